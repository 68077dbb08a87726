"""Command line: argv -> ModelMergerConfig -> run; results to stdout, everything else to stderr."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from types import FrameType
from typing import Any, NoReturn

from . import __version__
from .errors import MergeError, PeerError, RequestError, as_merge_error
from .request import (
    BACKENDS,
    COMM_BACKENDS,
    COMPONENTS,
    DTYPE_CHOICES,
    OUTPUT_FORMATS,
    SHARD_ORDERS,
    ModelMergerConfig,
)

EXAMPLES = """examples:
  torchrun --nproc_per_node=4 -m dist_merge merge --backend fsdp --local_dir actor \\
      --target_dir out --base_model Qwen-Image --trust-checkpoint
  python -m dist_merge test --backend fsdp --test_hf_dir out
  python -m dist_merge inspect --local_dir actor --trust-checkpoint
  python -m dist_merge upload --artifact out --hf_upload_path my-team/my-model
"""


def add_option(parser: Any, name: str, **options: Any) -> None:
    """Add an option in both spellings, `--base_model` and `--base-model`."""
    spellings = dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"])
    parser.add_argument(*spellings, dest=name, **options)


def add_merge_options(parser: argparse.ArgumentParser, *, is_merge: bool) -> None:
    """Options that `merge` and `inspect` share."""
    source = parser.add_argument_group("checkpoint")
    add_option(source, "backend", choices=BACKENDS, default="auto", help="kind of checkpoint")
    add_option(source, "local_dir", required=True, help="folder with the sharded checkpoint")
    add_option(source, "hf_model_config_path", help="actor's config folder (LOCAL_DIR/huggingface)")
    add_option(source, "state_key", help="which state dict of a DCP folder is the model")
    add_option(source, "check_crc", action="store_true", help="check the rank files' checksums")
    add_option(
        source,
        "assume_shard_order",
        choices=SHARD_ORDERS,
        help="which mesh axis split first, where a rank file does not tell",
    )
    add_option(
        source,
        "trust_checkpoint",
        action="store_true",
        help="acknowledge pickle input; no code from it is run",
    )
    base = parser.add_argument_group("base model")
    add_option(base, "base_model", help="base pipeline or lone transformer")
    add_option(base, "component", choices=COMPONENTS, default="transformer")
    add_option(base, "trust_remote_code", action="store_true", help="copy Python files of the base")
    parser.add_argument_group("base model")
    base.add_argument(
        "--compare-base",
        "--compare_base",
        dest="compare_base",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="hash the base's replaced weights for the manifest",
    )
    output = parser.add_argument_group("output")
    if is_merge:
        add_option(output, "target_dir", required=True, help="output folder; must not exist")
        add_upload_options(output, is_required=False)
    add_option(output, "output_format", choices=OUTPUT_FORMATS, default="pipeline")
    add_option(output, "dtype", choices=DTYPE_CHOICES, default="preserve")
    add_option(output, "max_shard_size", default="2GiB", help="bytes, or 2GiB / 5GB")
    adapter = parser.add_argument_group("LoRA")
    add_option(adapter, "adapter_name", default="default", help="which adapter of the checkpoint")
    add_option(adapter, "fuse_lora", action="store_true", help="fold it into the weights")
    add_option(adapter, "lora_config", help="adapter_config.json that states r, alpha and the rest")
    add_option(
        adapter,
        "allow_suspicious_zeros",
        action="store_true",
        help="accept an adapter of which one rank's rows seem to be lost",
    )
    run = parser.add_argument_group("run")
    add_option(run, "comm_backend", choices=COMM_BACKENDS, default="auto")
    add_option(run, "buffer_size", default="256MiB", help="transfer buffer")
    add_option(run, "timeout", type=float, default=1800.0, help="seconds without progress")
    add_option(run, "quiet", action="store_true", help="no progress on stderr")


def add_upload_options(parser: Any, *, is_required: bool) -> None:
    """Options that `merge` and `upload` share."""
    text = "ORG/REPO on the hub" if is_required else "upload to this ORG/REPO after publishing"
    add_option(parser, "hf_upload_path", required=is_required, help=text)
    add_option(parser, "private", action="store_true", help="the repository is private")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="dist_merge",
        description="Turn a sharded training checkpoint into a verified, deployable model folder.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"dist_merge {__version__}")
    commands = parser.add_subparsers(dest="operation", required=True)
    merge = commands.add_parser(
        "merge", help="merge a checkpoint and publish the result", allow_abbrev=False
    )
    add_merge_options(merge, is_merge=True)
    inspect = commands.add_parser(
        "inspect", help="say what a checkpoint holds and what a merge would do", allow_abbrev=False
    )
    add_merge_options(inspect, is_merge=False)
    add_option(inspect, "json", action="store_true", help="print JSON instead of lines")
    test = commands.add_parser(
        "test", help="recheck a published folder without the sources", allow_abbrev=False
    )
    add_option(test, "backend", choices=BACKENDS, default="auto", help="accepted, not needed")
    add_option(test, "test_hf_dir", required=True, help="published folder")
    upload = commands.add_parser(
        "upload", help="upload a published folder, or go on with an upload", allow_abbrev=False
    )
    add_option(upload, "artifact", required=True, help="published folder")
    add_upload_options(upload, is_required=True)
    add_option(upload, "base_model", help="the base's folder or name, for the model card")
    add_option(upload, "timeout", type=float, default=1800.0, help="seconds without progress")
    add_option(upload, "quiet", action="store_true", help="no progress on stderr")
    return parser


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and end the process with its exit code."""
    options = vars(make_parser().parse_args(argv))
    install_signal_handlers()
    try:
        result = run_command(options)
        if result is not None and is_rank_0():
            print(result, flush=True)
        leave(0)
    except MergeError as error:
        report_error(error)
        leave(error.exit_code)
    except KeyboardInterrupt:
        report_error(PeerError("interrupted", "interrupted from the keyboard"))
        leave(130)
    except Exception as error:
        if os.environ.get("DIST_MERGE_TRACEBACK"):
            raise
        report_error(as_merge_error(error, step="run"))
        leave(1)


def run_command(options: dict[str, Any]) -> str | None:
    """Run one command; returns the text for stdout."""
    operation = options["operation"]
    if operation in ("test", "upload") and not is_rank_0():
        return None
    if operation == "upload":
        from .upload import upload_artifact

        names = ("private", "base_model", "timeout", "quiet")
        report = upload_artifact(
            options["artifact"], options["hf_upload_path"], **{n: options[n] for n in names}
        )
        return json.dumps(asdict(report), sort_keys=True)
    if operation == "test":
        from .validate import validate_artifact

        return json.dumps(validate_artifact(options["test_hf_dir"]), sort_keys=True)
    as_json = options.pop("json", False)
    config = ModelMergerConfig(**options)
    if operation == "merge":
        from .run import merge_model

        return json.dumps(asdict(merge_model(config)), sort_keys=True)
    from .run import inspect_checkpoint

    found = inspect_checkpoint(config)
    return json.dumps(found, sort_keys=True) if as_json else format_report(found)


def format_report(report: dict[str, Any], indent: str = "") -> str:
    """Lay out an inspection report as lines for people."""
    lines = []
    for name, value in report.items():
        label = indent + (name if indent else name.replace("_", " "))
        if isinstance(value, dict) and value:
            lines += [f"{label}:", format_report(value, indent + "  ")]
        elif isinstance(value, list):
            lines += [f"{label}: {'; '.join(map(str, value)) or '-'}"]
        else:
            lines.append(f"{label}: {value if value not in (None, {}) else '-'}")
    return "\n".join(lines)


def is_rank_0() -> bool:
    """Whether this process speaks for all."""
    return os.environ.get("RANK", "0") == "0"


def install_signal_handlers() -> None:
    """Make SIGTERM an error that reaches all ranks; the main thread never sits in a transfer."""

    def handle(number: int, frame: FrameType | None) -> None:
        raise PeerError(
            "interrupted",
            f"received {signal.Signals(number).name}",
            hint="the launcher or scheduler stopped the job; a target that is there is complete",
        )

    signal.signal(signal.SIGTERM, handle)


def report_error(error: MergeError) -> None:
    """Print one message: rank 0 does, or the first survivor's name where rank 0 is the cause.

    The others write the same cause to torchelastic's error file, so its summary names it too.
    """
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file:
        message = {"message": str(error), "extraInfo": {"timestamp": str(int(time.time()))}}
        try:
            with open(error_file, "w", encoding="utf-8") as file:
                json.dump({"message": message}, file)
        except OSError:
            pass  # the message on stderr is what counts
    is_rank_0_dead = error.error_id.startswith("peer-") and error.rank == 0
    if is_rank_0() or (is_rank_0_dead and os.environ.get("RANK") == "1"):
        print(error, file=sys.stderr, flush=True)
    if isinstance(error, RequestError) and is_rank_0():
        print("run `dist_merge --help` for the options", file=sys.stderr, flush=True)


def leave(code: int) -> NoReturn:
    """End the process at once.

    Library threads that are still alive at interpreter exit (gloo's, or a transfer whose peer
    died) can abort a finished process; everything of ours is closed and flushed here.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
