"""Which experts stay: swap-based K-Medoids and the choice of representatives, on plain arrays.

Deterministic: ties are broken by what does not depend on how experts are numbered wherever there is such a
thing, and by the lower number otherwise.

Shape suffixes: E experts, C candidates (also experts), K medoids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Indices = NDArray[np.intp]

MIN_GAIN = 1e-12
"""Smallest decrease of the loss that counts; below it swaps would follow rounding errors in a circle."""


@dataclass(frozen=True)
class Clustering:
    """A K-Medoids partition.

    Attributes:
        medoids: Medoid of each cluster.
        labels: Cluster of each expert.
        loss: Sum of distances to the nearest medoid.
        start_loss: The same before the first swap.
        swaps: Swaps made.
    """

    medoids: tuple[int, ...]
    labels: tuple[int, ...]
    loss: float
    start_loss: float
    swaps: int


@dataclass(frozen=True)
class Selection:
    """The experts of one layer that stay.

    Attributes:
        kept: Their numbers, ascending.
        owner: For every expert the kept one that stands for it (itself, where it stays).
        start_loss: K-Medoids loss at the start; 0 where nothing was clustered.
        loss: K-Medoids loss at the end.
    """

    kept: tuple[int, ...]
    owner: tuple[int, ...]
    start_loss: float = 0.0
    loss: float = 0.0


def by_frequency(counts_E: Array, distance_EE: Array | None = None) -> list[int]:
    """Return all experts, the most frequent first; ties go to the more central, then the lower number."""
    spread_E = np.zeros(len(counts_E)) if distance_EE is None else distance_EE.sum(axis=1)
    return [int(expert) for expert in np.lexsort((np.arange(len(counts_E)), spread_E, -counts_E))]


def k_medoids(distance_EE: Array, start: Sequence[int]) -> Clustering:
    """Swap medoids for other experts, always by the best swap, until none lowers the loss.

    The loss change of all K·(E−K) swaps is known at once by the decomposition of FastPAM (Schubert and
    Rousseeuw, "Faster k-Medoids Clustering", 2019). After a swap only the experts are gone through again whose
    nearest or second medoid it concerns; before it ends, all are.

    Args:
        distance_EE: Symmetric distance with a zero diagonal.
        start: Medoids to start from, without repetition.
    """
    assert len(set(start)) == len(start) >= 1, start
    table = _Swaps(distance_EE, np.array(start, np.intp))
    start_loss = table.loss
    swaps, fresh = 0, True
    while len(start) < len(distance_EE):
        if table.swap():
            swaps, fresh = swaps + 1, False
        elif fresh:
            break
        else:  # sums that were kept up to date drift by rounding: the last word is with fresh ones
            table, fresh = _Swaps(distance_EE, table.medoids_K), True
    medoids_K = table.medoids_K
    labels_E = distance_EE[:, medoids_K].argmin(axis=1)
    labels_E[medoids_K] = np.arange(len(medoids_K))  # a medoid at distance 0 from another still leads its own
    return Clustering(
        medoids=tuple(int(medoid) for medoid in medoids_K),
        labels=tuple(int(label) for label in labels_E),
        loss=table.loss,
        start_loss=start_loss,
        swaps=swaps,
    )


class _Swaps:
    """The loss change of swapping each medoid for each expert, kept up to date from swap to swap.

    Attributes:
        medoids_K: The medoids.
        loss: Sum of distances to the nearest medoid.
        change_KC: Loss change of a swap, without what the candidate gains where no medoid leaves.
        gained_C: That gain (at most 0).
    """

    def __init__(self, distance_EE: Array, medoids_K: Indices) -> None:
        experts = len(distance_EE)
        self.distance_EE, self.medoids_K = distance_EE, medoids_K.copy()
        self.to_EE = np.ascontiguousarray(distance_EE.T)  # a medoid's distances lie side by side
        self.nearest_E = np.zeros(experts, np.intp)
        self.near_E, self.second_E = np.zeros(experts), np.zeros(experts)
        self.gain_EC, self.loss_EC = np.zeros((experts, experts)), np.zeros((experts, experts))
        self._look(np.arange(experts))
        self.loss = float(self.near_E.sum())
        owner_KE = np.arange(len(medoids_K))[:, None] == self.nearest_E
        self.change_KC = owner_KE.astype(np.float64) @ self.loss_EC
        self.gained_C = self.gain_EC.sum(axis=0)
        self.total_KC = np.empty_like(self.change_KC)

    def swap(self) -> bool:
        """Make the best swap; return whether it lowers the loss (it is not made otherwise)."""
        total_KC = np.add(self.change_KC, self.gained_C, out=self.total_KC)
        total_KC[:, self.medoids_K] = np.inf
        slot, candidate = np.unravel_index(np.argmin(total_KC), total_KC.shape)
        before = self.medoids_K[slot]
        swapped_K = self.medoids_K.copy()
        swapped_K[slot] = candidate
        loss = float(self.to_EE[swapped_K].min(axis=0).sum())
        if self.loss - loss <= MIN_GAIN:
            return False
        self.medoids_K, self.loss = swapped_K, loss
        reach_E = np.minimum(self.to_EE[candidate], self.to_EE[before])
        rows = np.flatnonzero(reach_E <= self.second_E)
        self._add(rows, -1.0)
        self._look(rows)
        self._add(rows, 1.0)
        return True

    def _look(self, rows: Indices) -> None:
        """Find nearest and second medoid of some experts, and what swaps mean for them."""
        to_medoids_RK = self.distance_EE[np.ix_(rows, self.medoids_K)]
        near_R1 = to_medoids_RK.min(axis=1, keepdims=True)
        with_none_RK = np.hstack(
            (to_medoids_RK, np.full_like(near_R1, np.inf))
        )  # a lone medoid has no second
        second_R1 = np.partition(with_none_RK, 1, axis=1)[:, 1:2]
        gain_RC = np.minimum(self.distance_EE[rows] - near_R1, 0.0)  # the candidate joins, no medoid leaves
        self.gain_EC[rows] = gain_RC
        # … and the expert's own medoid leaves
        self.loss_EC[rows] = np.minimum(self.distance_EE[rows], second_R1) - near_R1 - gain_RC
        self.nearest_E[rows] = to_medoids_RK.argmin(axis=1)
        self.near_E[rows], self.second_E[rows] = near_R1[:, 0], second_R1[:, 0]

    def _add(self, rows: Indices, sign: float) -> None:
        """Add the part of some experts to the sums."""
        self.gained_C += sign * self.gain_EC[rows].sum(axis=0)
        nearest_R = self.nearest_E[rows]
        for slot in np.unique(nearest_R):
            self.change_KC[slot] += sign * self.loss_EC[rows[nearest_R == slot]].sum(axis=0)


def select_clustered(
    counts_E: Array, router_EE: Array, joint_of: Callable[[Indices], Array], keep: int
) -> Selection:
    """Cluster the experts that calibration reached and keep the most frequent one of each cluster.

    Experts that were never active say nothing about themselves but their router row: each is attached to
    the kept expert with the nearest one. Only where fewer than `keep` experts were active are some of them
    kept, chosen so that all experts are near a kept one.

    Args:
        counts_E: Tokens routed to each expert.
        router_EE: Router distance.
        joint_of: Joint distance among the given experts, [n, n].
        keep: Experts to keep (K).
    """
    live = np.flatnonzero(counts_E > 0)
    if len(live) <= keep:
        return attach(fill(live, router_EE, keep), router_EE)
    distance_EE = joint_of(live)
    counts_live = counts_E[live]
    order = by_frequency(counts_live, distance_EE)
    clustering = k_medoids(distance_EE, order[:keep])
    first: dict[int, int] = {}
    for member in order:  # the most frequent comes first
        first.setdefault(clustering.labels[member], member)
    kept = tuple(sorted(int(live[member]) for member in first.values()))
    attached = attach(kept, router_EE)
    owner = list(attached.owner)
    for member, label in enumerate(clustering.labels):
        owner[int(live[member])] = int(live[first[label]])
    return Selection(kept, tuple(owner), clustering.start_loss, clustering.loss)


def attach(kept: Sequence[int], router_EE: Array) -> Selection:
    """Return a selection in which each expert belongs to the kept one with the nearest router row."""
    kept_K = np.array(sorted(kept), np.intp)
    owner_E = kept_K[router_EE[:, kept_K].argmin(axis=1)]
    owner_E[kept_K] = kept_K
    return Selection(tuple(int(k) for k in kept_K), tuple(int(o) for o in owner_E))


def fill(live: Indices, router_EE: Array, keep: int) -> list[int]:
    """Return the active experts and as many others as needed, each time the one that lowers Σ d most."""
    kept = [int(expert) for expert in live]
    near_E = router_EE[:, kept].min(axis=1) if kept else np.full(len(router_EE), np.inf)
    while len(kept) < keep:
        total_C = np.minimum(near_E[:, None], router_EE).sum(axis=0)
        total_C[kept] = np.inf
        kept.append(int(total_C.argmin()))
        near_E = np.minimum(near_E, router_EE[:, kept[-1]])
    return kept


def jaccard(first: Sequence[int], second: Sequence[int]) -> float:
    """Return the size of the intersection over the size of the union of two selections."""
    return len(set(first) & set(second)) / len(set(first) | set(second))
