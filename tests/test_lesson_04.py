"""Lesson 04: how ranks find each other, how that fails, and who is named."""

import pytest
from breaks import check_breaks

BREAKS = {
    "no roll call": ("    call_the_roll(store, rank, world_size, limit)\n", ""),
    "a rank that comes twice goes unnoticed": ('f"rank {rank}", 1) > 1', 'f"rank {rank}", 1) > 9'),
    "nobody compares world sizes": ("if size != str(world_size)", "if False", (2,)),
    "who is missing is not said": ("if not store.check([f", "if store.check([f"),
    "the others are not told": ('store.compare_set("verdict", "", problem)', "pass", (2,)),
    "two jobs in one store": ('f"{job}, attempt {attempt}"', 'f"attempt {attempt}"'),
    "a restart finds the marks of the first attempt": ('f"{job}, attempt {attempt}"', "job"),
    "no key space of one's own": ("store = dist.PrefixStore(", "dist.PrefixStore("),
    "rank taken for local rank": ('int(os.environ["RANK"])', 'int(os.environ["LOCAL_RANK"])'),
    "world size of one machine": ('["WORLD_SIZE"])', '["LOCAL_WORLD_SIZE"])'),
    "a store that nobody closes": (
        "    return dist.TCPStore(",
        "    kept = globals()['kept'] = dist.TCPStore(host, int(port), world_size, **options)
"
        "    return kept or dist.TCPStore(",
    ),
    "an address that only this machine knows": (
        'host, _, port = place.rpartition(":")\n    options',
        'host, port = "127.0.1.1", place.rpartition(":")[2]\n    options',
    ),
    "a port of its own choice": ("int(port)), family", "29517), family"),
    "on all addresses": ('create_server((host.strip("[]"), int', 'create_server(("", int'),
    "every rank holds a store": ("if rank == 0 and", "if"),
    "all join as rank 0": ("store=store, rank=rank,", "store=store, rank=0,"),
    "each joins a world of its own": ("world_size=world_size, timeout=limit", "world_size=1"),
}


@pytest.mark.parametrize("nproc", (2, 3))
def test_each_break_ends_in_fail(nproc):
    check_breaks(4, BREAKS, nproc)
