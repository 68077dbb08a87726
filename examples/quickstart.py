"""The main job on real input, start to end, with a tiny model. See launch/quickstart.sh."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def say(text: str) -> None:
    """Print one line of progress."""
    print(f"[quickstart] {text}", flush=True)


def choose_folder() -> Path:
    """The folder named on the command line, or the next free number."""
    if len(sys.argv) > 1:
        return Path(sys.argv[1]).resolve()
    parent = ROOT / "quickstart_run"
    numbers = [int(p.name) for p in parent.glob("*") if p.name.isdigit()]
    return parent / str(max(numbers, default=0) + 1)


def run(*command: str) -> str:
    """Run one command, show it, and return its stdout."""
    shown = " ".join(command).replace(f"{sys.executable} -m torch.distributed.run", "torchrun")
    say(f"$ {shown.replace(sys.executable, 'python')}")
    environment = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **os.environ}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"[quickstart] failed with exit code {done.returncode}; see the lines above")
    return done.stdout


def check_reload(run_dir: Path, output: Path) -> None:
    """Reload the result with Diffusers and compare it with the training run, bit for bit."""
    import torch
    from diffusers import QwenImagePipeline
    from safetensors.torch import load_file

    from tests.helpers.tiny_models import run_reloaded

    reference = load_file(run_dir / "reference.safetensors")
    transformer = QwenImagePipeline.from_pretrained(str(output)).transformer
    state = transformer.state_dict()
    equal = sum(torch.equal(state[name], tensor) for name, tensor in reference.items())
    forward = torch.load(run_dir / "forward.pt", weights_only=True)
    same = torch.equal(run_reloaded(transformer), forward)
    say(f"reloaded with QwenImagePipeline.from_pretrained: {equal} of {len(reference)} tensors")
    say(f"equal the training run's full_tensor() bit for bit; same forward output: {same}")
    if equal != len(reference) or len(state) != len(reference) or not same:
        sys.exit("[quickstart] the result differs from the training run")


def main() -> None:
    """Build, train, merge, test, reload."""
    from tests.helpers.tiny_models import build_pipeline

    folder = choose_folder()
    folder.mkdir(parents=True)
    base, run_dir, output = folder / "base", folder / "run", folder / "merged"
    say("building a tiny Qwen-Image pipeline (real classes, small sizes)")
    build_pipeline(base)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc_per_node=2", "-m"]
    say("training its transformer for one AdamW step with FSDP2 on 2 gloo ranks")
    train = ["tests.helpers.train_fsdp", "--pipeline", str(base), "--out", str(run_dir)]
    run(*torchrun, *train)
    actor = run_dir / "actor"
    say(f"rank files: {', '.join(sorted(p.name for p in actor.glob('*.pt')))}")
    merge = ["--local_dir", str(actor), "--target_dir", str(output), "--base_model", str(base)]
    say("merging them")
    text = run(*torchrun, "dist_merge", "merge", "--backend", "fsdp", *merge, "--trust-checkpoint")
    result = json.loads(text)
    say("rechecking the published folder without the sources")
    test = ["test", "--backend", "fsdp", "--test_hf_dir", str(output)]
    run(sys.executable, "-m", "dist_merge", *test)
    check_reload(run_dir, output)
    say(
        f"done: {result['num_tensors']} tensors, {result['nbytes']} bytes of weights, "
        f"{result['num_files']} files"
    )
    say(f"the pipeline lies in {output}")


if __name__ == "__main__":
    main()
