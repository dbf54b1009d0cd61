"""ClusterKV: clusters by cosine, read in the order of their centroids' products with the query."""

from __future__ import annotations

import math

import pytest
import torch

from attend import asking
from kvsieve.core.clusters import KeyClusters, clusters
from kvsieve.core.kv_rows import KVRows, ReadFacts
from kvsieve.errors import PlanError
from kvsieve.methods import ClusterKV
from kvsieve.methods.clusterkv import ClusterSetting


def kv_rows_of(keys):
    size = keys.shape[1]
    return KVRows(keys.flatten(0, 1), keys.flatten(0, 1), None, torch.arange(len(keys)) * size, 1, size)


def test_clusters_by_angle_not_by_length():
    keys = torch.tensor([[[1.0, 0.1], [0.1, 3.0], [9.0, 0.0], [0.0, 1.0], [2.0, 0.2]]])
    centroids, labels = clusters(keys, 2, 20)
    assert labels.tolist() == [[1, 0, 1, 0, 1]]
    torch.testing.assert_close(centroids, torch.tensor([[[0.05, 2.0], [4.0, 0.1]]]))


def slow_clusters(keys, count, iterations):
    """k-means by cosine, one key after another."""

    def cosine(a, b):
        return float(a @ b) / (math.sqrt(float(a @ a)) * math.sqrt(float(b @ b)))

    size = len(keys)
    centroids = [keys[number * size // count] for number in range(count)]
    labels = None
    for _ in range(iterations):
        new = [max(range(count), key=lambda c, key=key: cosine(key, centroids[c])) for key in keys]
        if new == labels:
            return centroids, labels
        labels = new
        for c in range(count):
            members = [key for key, label in zip(keys, labels, strict=True) if label == c]
            centroids[c] = sum(members) / len(members) if members else centroids[c]
    return centroids, [max(range(count), key=lambda c, key=key: cosine(key, centroids[c])) for key in keys]


def slow_choice(query, keys, setting, per_cluster, iterations):
    """Entries that one query reads of the keys of one KV row."""
    size, sinks = len(keys), setting.sinks
    start, end = sinks, setting.prompt
    found = []
    while end < size:
        count = max((end - start) // per_cluster, 1)
        centroids, labels = slow_clusters(keys[start:end], count, iterations)
        for c, centroid in enumerate(centroids):
            found.append((float(query @ centroid), [start + at for at, label in enumerate(labels) if label == c]))
        start, end = end, end + setting.page
    newest = range(start, size)
    read = [*range(sinks), *newest]
    ordered = [entry for _, members in sorted(found, key=lambda one: -one[0]) for entry in members]
    return sorted(read + ordered[: setting.count - len(read)])


@pytest.mark.parametrize("iterations", [1, 20])
@pytest.mark.parametrize("per_query_head", [False, True])
@pytest.mark.parametrize("size", [41, 42, 50])
def test_entries_are_those_of_the_definition(size, per_query_head, iterations):
    torch.manual_seed(size)
    query, keys = torch.randn(2, 3, 5, dtype=torch.float64), torch.randn(2, size, 5, dtype=torch.float64)
    setting = ClusterSetting(20, 20, 4, sinks=2, prompt=36)
    reader = ClusterKV(budget=20, per_cluster=6, iterations=iterations, per_query_head=per_query_head)
    found = reader.choose(asking(query, 0.3), kv_rows_of(keys), {}, setting).entries
    for row in range(2):
        queries = query[row] if per_query_head else query[row].mean(0, keepdim=True)
        for number, one in enumerate(queries):
            own = found[row, number] if per_query_head else found[row]
            assert sorted(own.tolist()) == slow_choice(one, keys[row], setting, 6, iterations)
            assert size - 1 in own.tolist()


def test_chunks_as_they_come_and_after_tokens_are_taken_back():
    torch.manual_seed(0)
    keys = torch.randn(2, 60, 5)
    whole, parts = KeyClusters(2, 30, 5, 4, 20), KeyClusters(2, 30, 5, 4, 20)
    whole.update(kv_rows_of(keys))
    for size in (31, 40, 58):
        parts.update(kv_rows_of(keys[:, :size]))
    assert parts.size == 55
    parts.keep_first(41)
    assert (parts.size, parts.order.shape[1]) == (40, 38)
    parts.update(kv_rows_of(keys))
    assert whole.size == parts.size == 55
    for name in ("centroids", "sizes", "order"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name))
    parts.keep_first(20)
    assert parts.size == 0 and parts.centroids is None


def test_settings_leave_room_for_clusters():
    facts = ReadFacts(0, 4, 4000, 0, 64)
    assert ClusterKV(budget=1024).setting(facts) == ClusterSetting(1024, 1024, 320, sinks=16, prompt=4000)
    assert ClusterKV(budget=32).setting(facts) == ClusterSetting(32, 32, 16, sinks=8, prompt=4000)


@pytest.mark.parametrize("name", ["per_cluster", "chunk_length", "iterations"])
def test_bad_parameters_are_refused(name):
    with pytest.raises(PlanError, match=f"{name} must be a whole number"):
        ClusterKV(budget=16, **{name: 0})
