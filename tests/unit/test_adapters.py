"""Names, strength and arithmetic of adapters, without files."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from dist_merge.adapters.export import choose_targets
from dist_merge.adapters.fold import (
    BLOCK_NUMEL,
    FoldConv,
    FoldLinear,
    FoldTransposed,
    iter_blocks,
    unfold,
)
from dist_merge.adapters.keys import parse_key, sort_names
from dist_merge.adapters.settings import AdapterSettings, choose_settings
from dist_merge.adapters.watch import find_zero_blocks
from dist_merge.errors import PlanError
from dist_merge.operations import Apply, Cast, Read


@pytest.mark.parametrize(
    ("fqn", "wanted"),
    [
        ("a.b.lora_A.default.weight", ("a.b", "lora_A.weight", "default")),
        ("a.lora_B.lora.bias", ("a", "lora_B.bias", "lora")),
        ("a.lora_A.lora_A.weight", ("a", "lora_A.weight", "lora_A")),
        ("a.lora_A.weight.weight", ("a", "lora_A.weight", "weight")),
        ("a.lora_A.weight", ("a", "lora_A.weight", "default")),
        ("a.lora_embedding_A.old", ("a", "lora_embedding_A", "old")),
        ("a.lora_embedding_B", ("a", "lora_embedding_B", "default")),
        ("a.lora_magnitude_vector.x.weight", ("a", "lora_magnitude_vector.weight", "x")),
        ("a.lora_magnitude_vector", ("a", "lora_magnitude_vector.weight", "default")),
        ("a.my_lora_A.default.weight", None),
        ("lora_A.weight", None),
        ("a.base_layer.weight", None),
    ],
)
def test_parse_key(fqn: str, wanted: tuple[str, str, str] | None) -> None:
    """Catches names taken apart by text instead of by structure."""
    key = parse_key(fqn)
    assert (key and (key.module, key.part, key.adapter)) == wanted


def test_sort_names_takes_wrappers_out_of_wrapped_modules_only() -> None:
    """Catches a module that is called base_layer without an adapter."""
    names = sort_names(
        [
            "a.base_layer.weight",
            "a.lora_A.default.weight",
            "a.lora_B.default.weight",
            "own.base_layer.weight",
            "head.original_module.weight",
            "head.modules_to_save.default.weight",
            "head.modules_to_save.old.weight",
            "other.original_module.weight",
        ]
    )
    assert names.plain == {
        "a.weight": "a.base_layer.weight",
        "own.base_layer.weight": "own.base_layer.weight",
        "other.original_module.weight": "other.original_module.weight",
    }
    assert names.originals == {"head.weight": "head.original_module.weight"}
    assert names.adapters == ["default", "old"]
    assert not names.is_lora_only


def test_sort_names_refuses_a_plain_twin() -> None:
    """Catches a weight that is there twice, once with and once without its adapter."""
    with pytest.raises(PlanError, match="key-collision"):
        sort_names(["a.base_layer.weight", "a.weight", "a.lora_A.x.weight", "a.lora_B.x.weight"])


def test_scaling_follows_patterns_and_rslora() -> None:
    """Catches alpha and r of different modules mixed up."""
    settings = AdapterSettings(
        r=8,
        lora_alpha=16,
        source="x",
        use_rslora=True,
        rank_pattern={"to_v": 4},
        alpha_pattern={"blocks.1.to_v": 2, "to_k": 3},
    )
    assert settings.scaling_of("blocks.0.to_q") == 16 / math.sqrt(8)
    assert settings.scaling_of("blocks.1.to_v") == 2 / math.sqrt(4)
    assert settings.scaling_of("blocks.0.to_v") == 16 / math.sqrt(4)
    assert settings.scaling_of("to_k") == 3 / math.sqrt(8)
    assert settings.scaling_of("not_to_k") == 16 / math.sqrt(8)


def test_meta_file_may_have_cut_alpha() -> None:
    """Catches a contradiction seen where the weaker record only lost the fraction."""
    places: list[tuple[str, dict[str, Any]]] = [
        ("adapter_config.json", {"r": 4, "lora_alpha": 12.7}),
        ("lora_train_meta.json", {"r": 4, "lora_alpha": 12}),
    ]
    chosen = choose_settings(places, adapter="default", adapters=["default"])
    assert chosen.lora_alpha == 12.7
    places[1][1]["lora_alpha"] = 13
    with pytest.raises(PlanError, match="adapter-settings-contradict"):
        choose_settings(places, adapter="default", adapters=["default"])


def test_record_of_another_adapter_is_not_taken() -> None:
    """Catches the strength of `default` used for the adapter `old`."""
    places = [("lora_train_meta.json", {"r": 4, "lora_alpha": 12})]
    with pytest.raises(PlanError, match="adapter-settings-missing"):
        choose_settings(places, adapter="old", adapters=["default", "old"])
    assert choose_settings(places, adapter="old", adapters=["old"]).r == 4
    own = [("lora_adapter/old/adapter_config.json", {"r": 2, "lora_alpha": 1})]
    assert choose_settings([*own, *places], adapter="old", adapters=["default", "old"]).r == 2


def test_fold_embedding_equals_peft() -> None:
    """Catches a transposed delta, and DoRA's norm over the wrong dimension."""
    import peft

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 5))
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["0", "1"], init_lora_weights=False)
    wrapped = peft.get_peft_model(model, config)
    state = {k: v.detach().clone() for k, v in wrapped.base_model.model.state_dict().items()}
    merged = wrapped.merge_and_unload().state_dict()
    parts = ("base_layer.weight", "lora_embedding_A.default", "lora_embedding_B.default")
    operands = [state[f"0.{part}"] for part in parts]
    assert torch.equal(FoldTransposed(5 / 3).apply(operands), merged["0.weight"])
    operands = [state[f"1.{n}.weight"] for n in ("base_layer", "lora_A.default", "lora_B.default")]
    assert torch.equal(FoldLinear(5 / 3).apply(operands), merged["1.weight"])


def test_fold_in_blocks_equals_the_whole_for_any_number_of_threads() -> None:
    """Catches bits that depend on where a block ends, or on the threads."""
    torch.manual_seed(0)
    columns = BLOCK_NUMEL // 700
    weight, a, b = torch.randn(1401, columns), torch.randn(8, columns), torch.randn(1401, 8)
    assert len(list(iter_blocks(weight))) == 2
    threads = torch.get_num_threads()
    results = []
    for number in (1, 2):
        torch.set_num_threads(number)
        results.append(FoldLinear(0.5).apply([weight, a, b]))
    torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], weight + (b @ a) * 0.5)


def test_blocks_cover_all_rows_and_never_one() -> None:
    """Catches a last block of one row, which takes another kernel."""
    for rows in (0, 1, 2, 3, 5, 1401):
        weight = torch.empty(rows, BLOCK_NUMEL // 2, device="meta")
        blocks = [(block.start, block.stop) for block in iter_blocks(weight)]
        assert [stop for _, stop in blocks[:-1]] == [start for start, _ in blocks[1:]]
        assert sum(stop - start for start, stop in blocks) == rows
        assert rows < 2 or all(stop - start > 1 for start, stop in blocks)


def test_fold_conv_of_a_point_kernel() -> None:
    """Catches kernel dimensions laid out in the wrong order."""
    torch.manual_seed(0)
    weight, a, b = torch.randn(6, 4, 3, 2), torch.randn(2, 4, 3, 2), torch.randn(6, 2, 1, 1)
    delta = torch.einsum("or,rikl->oikl", b[:, :, 0, 0], a)
    assert torch.allclose(FoldConv(2.0).apply([weight, a, b]), weight + 2 * delta, atol=1e-6)


def test_unfold_leaves_everything_else() -> None:
    """Catches a comparison with a weight that lacks the cast."""
    inner = Apply(FoldLinear(1.0), (Read("w"), Read("a"), Read("b")))
    assert unfold(Apply(Cast("bfloat16"), (inner,))) == Apply(Cast("bfloat16"), (Read("w"),))


def test_targets_become_a_pattern_where_a_name_is_a_tail() -> None:
    """Catches PEFT matching `proj_out` in every block."""
    assert choose_targets(["a.q", "a.k"], modules=["a.q", "a.k", "b"]) == ["a.k", "a.q"]
    assert choose_targets(["proj_out"], modules=["proj_out", "b.0.proj_out"]) == "proj_out"
    assert choose_targets(["b.q", "c"], modules=["a.b.q"]) == r"b\.q|c"
    assert choose_targets(["c"], modules=[]) == "c"


@pytest.mark.parametrize(
    ("zero", "wanted"),
    [
        ({"x": [0, 0, 1, 1]}, (2, 1)),
        ({"x": [1, 1, 0, 0], "y": [1, 1, 1, 0, 0, 0]}, (2, 0)),
        ({"x": [0, 0, 1, 1], "y": [1, 1, 0, 0]}, None),
        ({"x": [0, 0, 1, 1], "y": [1, 1, 1, 1]}, (2, 1)),
        # One row of one module may be dead; the same row of all modules is not.
        ({"x": [0, 1, 0, 0, 0, 0]}, None),
        ({"x": [0, 1, 0, 0, 0, 0], "y": [0, 1, 0, 0, 0, 0]}, (6, 1)),
        ({"x": [0, 0, 0, 0]}, None),
        ({"x": [1, 1, 1]}, None),
        # 5 rows over 3 ranks: 2, 2, 1.
        ({"x": [0, 0, 0, 0, 1], "y": [0, 0, 0, 0, 0, 0, 1, 1]}, (3, 2)),
    ],
)
def test_find_zero_blocks(zero: dict[str, list[int]], wanted: tuple[int, int] | None) -> None:
    """Catches a lost rank, and an alarm about rows that are zero in one module only."""
    rows = {f"{n}.lora_B.d.weight": torch.tensor(v, dtype=torch.bool) for n, v in zero.items()}
    found = find_zero_blocks(rows)
    assert (found and found[:2]) == wanted
