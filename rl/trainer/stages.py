"""Whether a model can be cut into pipeline stages. Light: the driver asks it before it starts anything.

Between stages travels the hidden state alone, so that layers that share an indexer's choice must be on one stage.
"""

from __future__ import annotations

from collections.abc import Sequence

FULL = "full"
"""Of a layer that has an indexer of its own."""


def selecting_layer(indexer_types: Sequence[str], layer: int) -> int:
    """The layer whose indexer selects for this one: the last one up to it that has an indexer. The groups may be of any
    sizes; GLM-5.2's first ones are smaller than the others.

    Raises:
        ValueError: there is none.
    """
    having = [index for index in range(layer + 1) if indexer_types[index] == FULL]
    if not having:
        raise ValueError(f"indexer_types: layer {layer} shares an indexer, but none comes before it")
    return having[-1]


def stage_problem(layers: int, indexer_types: Sequence[str] | None, stages: int) -> str | None:
    """What is wrong with cutting a model into stages of as many layers each, and which numbers of them work; None if it
    can be done.

    Args:
        indexer_types: of each layer's sparse attention; None for a model without.
    """
    working = [n for n in range(1, layers + 1) if layers % n == 0 and not _cut_layers(layers, indexer_types, n)]
    if stages in working:
        return None
    if layers % stages:
        wrong = f"num_hidden_layers {layers} is not a multiple of the {stages} stages"
    else:
        first = _cut_layers(layers, indexer_types, stages)[0]
        shared = selecting_layer(indexer_types or (), first)
        wrong = f"layer {first} begins a pipeline stage, but shares the indexer of layer {shared}"
    return f"{wrong}; pipeline · virtual_pipeline in {working} works"


def _cut_layers(layers: int, indexer_types: Sequence[str] | None, stages: int) -> list[int]:
    """Those that begin a stage, but share the indexer of a layer before it."""
    if indexer_types is None:
        return []
    return [first for first in range(0, layers, layers // stages) if selecting_layer(indexer_types, first) != first]
