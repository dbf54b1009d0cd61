"""Tensor parallelism: processes with a part of every layer's heads, and identical choices.

transformers divides a model's weights among the processes started by torchrun; hidden states are complete on all of
them. Decisions for one KV head need no other process. Decisions for a whole layer are computed from all processes'
parts, which are exchanged (`types.Ranks`), in the same order on each, so that rounding and ties are identical.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kvsieve.errors import PlanError, UnsupportedModelError
from kvsieve.hf.compat import device_mesh, tensor_parallel_mesh, text_config
from kvsieve.planning.plans import Plan
from kvsieve.types import ALONE, Ranks


class GroupRanks(Ranks):
    """The processes of one torch process group. heads: query heads of a layer, on all of them; device: this one's."""

    def __init__(self, group: dist.ProcessGroup, heads: int, device: torch.device) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group))
        self._group = group
        self._heads = heads
        self._device = device

    def check_heads(self, query_heads: int) -> None:
        if query_heads * self.size != self._heads:
            raise UnsupportedModelError(
                f"this process attends with {query_heads} query heads, one part in {self.size} of {self._heads} was "
                "expected: the model's tensor-parallel plan does not divide attention by heads; run it on one process"
            )

    def mean(self, part: Tensor) -> Tensor:
        return torch.stack(self._all(part)).mean(0)

    def gather(self, scores: Tensor) -> Tensor:
        length = self.most((scores.shape[-1],))[0]
        missing = length - scores.shape[-1]
        return torch.cat(self._all(torch.nn.functional.pad(scores, (missing, 0), value=float("-inf"))), 1)

    def most(self, counts: tuple[int, ...]) -> tuple[int, ...]:
        tensor = torch.tensor(counts, dtype=torch.int64, device=self._device)
        return tuple(torch.stack(self._all(tensor)).amax(0).tolist())

    def _all(self, part: Tensor) -> list[Tensor]:
        """Every rank's `part`, in the order of ranks."""
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part, group=self._group)
        return parts


def ranks_of(model: Any, plan: Plan) -> Ranks:
    """Return the processes of tensor parallelism, `ALONE` without it.

    Raises UnsupportedModelError for a model that is not divided by whole heads, and PlanError for a plan that could
    decide by the heads of one process alone.
    """
    mesh = tensor_parallel_mesh(model)
    if mesh is None:
        _check_whole(model)
        return ALONE
    config = text_config(model)
    size = mesh.size()
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if heads % size or kv_heads % size:
        raise UnsupportedModelError(
            f"{type(model).__name__} has {heads} query and {kv_heads} KV heads, which {size} processes cannot share "
            "evenly; use a number of processes that divides both"
        )
    for role in (plan.propagate, plan.evict, plan.prefill):
        if role is not None and role.traits.heads is None:
            raise PlanError(
                f"{plan.name!r} cannot run on a model whose heads are divided among {size} processes: "
                f"{type(role).__name__} does not say whose heads it looks at (heads=, see roles.Traits), "
                "and might decide on the heads of one process alone; run it on one, or use another method "
                "(docs/models.md)"
            )
    if plan.read is not None and plan.read.traits.heads == "all":
        raise PlanError(
            f"{plan.name!r} cannot run on a model whose heads are divided among {size} processes: "
            f"{type(plan.read).__name__} reads by what other heads choose; run it on one, or use another reader"
        )
    return GroupRanks(mesh.get_group(), heads, model.device)


def _check_whole(model: Any) -> None:
    if not (dist.is_available() and dist.is_initialized()):
        return
    from torch.distributed.tensor import DTensor

    if device_mesh(model) is not None or any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise UnsupportedModelError(
            f"{type(model).__name__} is divided among processes in a way kvsieve does not know: it runs under tensor "
            "parallelism as transformers sets it up, with nothing beside it (docs/models.md)"
        )
