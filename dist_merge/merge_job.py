"""What inspection found, put together: everything the plan is made from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .adapters.keys import AdapterNames, check_adapter
from .adapters.settings import AdapterSettings, choose_settings, find_settings
from .architectures import find_architecture
from .base_reader import list_base_shards
from .group import Group
from .inspect_sources import OpenSources
from .layouts import LAYOUTS
from .plan import make_adapter_plan, make_plan
from .records import BaseModel, MergePlan
from .request import ModelMergerConfig


@dataclass
class Job:
    """Checkpoint, base and adapter of one run."""

    config: ModelMergerConfig
    sources: OpenSources
    base: BaseModel | None
    names: AdapterNames
    settings: AdapterSettings | None

    @property
    def is_adapter_alone(self) -> bool:
        """Whether only an adapter folder is published."""
        return self.names.is_lora_only and not self.config.fuse_lora

    @property
    def reads_base(self) -> bool:
        """Whether the base's own weights are sources: an adapter alone is folded into them."""
        return self.names.is_lora_only and self.config.fuse_lora

    @property
    def hashes_base(self) -> bool:
        """Whether the base's replaced weights are read for the manifest."""
        return self.config.compare_base or self.reads_base

    @property
    def copied_nbytes(self) -> int:
        """Upper bound of the bytes copied from the base."""
        return 0 if self.base is None else sum(file.nbytes for file in self.base.files)

    def make_plan(self) -> MergePlan:
        """Make the plan; pure, the same on every rank."""
        inventory = self.sources.inventory
        if self.is_adapter_alone:
            return make_adapter_plan(
                inventory, base=self.base, config=self.config, settings=self.settings
            )
        assert self.base is not None
        if self.reads_base:
            shards = (*inventory.shards, *list_base_shards(self.base))
            inventory = replace(inventory, shards=shards)
        architecture = find_architecture(self.base.transformer_class)
        architecture.check_base(self.base)
        return make_plan(
            inventory,
            base=self.base,
            architecture=architecture,
            layout=LAYOUTS[self.config.output_format],
            config=self.config,
            settings=self.settings,
        )


@dataclass(frozen=True)
class MergedShards:
    """Rank 0: written files (path -> SHA256, size), remarks, and counts of a fold."""

    files: Mapping[str, tuple[str, int]]
    notes: tuple[str, ...]
    fold_counts: Mapping[str, int]


def inspect_adapter(
    config: ModelMergerConfig, names: AdapterNames, *, local_dir: Path, group: Group
) -> AdapterSettings | None:
    """Find the strength of the chosen adapter; None where the checkpoint has no adapter.

    Raises:
        PlanError: There is no such adapter, or nothing certain says how strong it is.

    Ranks: collective; the files may lie on any rank's machine.
    """
    if not names.adapters and not config.fuse_lora:
        return None

    def read() -> bytes:
        check_adapter(names, config.adapter_name)
        lora_config = None if config.lora_config is None else Path(config.lora_config)
        if group.rank != 0:
            lora_config = None
        places = find_settings(local_dir, adapter=config.adapter_name, lora_config=lora_config)
        return json.dumps(places).encode()

    payloads = group.exchange("adapter-settings", group.prepare("read-adapter-settings", read))
    places: list[tuple[str, dict[str, Any]]] = []
    for payload in payloads:
        places += [
            (place, data) for place, data in json.loads(payload) if (place, data) not in places
        ]
    return group.prepare(
        "choose-adapter-settings",
        lambda: choose_settings(places, adapter=config.adapter_name, adapters=names.adapters),
        is_shared=True,
    )
