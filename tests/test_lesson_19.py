"""Lesson 19: ten jobs that hang or fail; what each tool says is measured, and PASS means it."""

import pytest
from breaks import check_breaks

OF_A_JOB = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
PLACES = 'places = {rank: where(run.text(rank, "stacks")) for rank in looks}'
CELL = '{"verdict": verdict(found, guilty, world_size)}'

BREAKS = {
    "a patient that is healthy": ("if step >= steps and loss < 0.01:", "if step > 2 * steps:"),
    "another rank is the guilty one": (
        "scale = 0.01 if rank == world_size - 1 else",
        "scale = 0.01 if rank == 1 else",
    ),
    "the stacks are not asked for": (
        '        leave_stacks(run.folder / f"stacks_{rank}")\n',
        "",
    ),
    "the stacks are those of rank 0": (PLACES, PLACES.replace("text(rank", "text(0")),
    "the stacks come from the first ranks only": (
        PLACES,
        PLACES.replace("in looks", "in [0, 1]"),
    ),
    "the guilty rank is taken to be with the most": (
        "if said[rank] != most]",
        "if said[rank] == most]",
    ),
    "the recorder is read without its last call": (
        '.get("entries", []):',
        '.get("entries", [])[:-1]:',
    ),
    "the recorder writes nothing": (
        "    Path(path).write_bytes(torch._C._distributed_c10d._dump_fr_trace())",
        "    pass",
    ),
    "the analyzer reads the ranks in another order": (
        "str(path)) for path in paths}",
        "str(path)) for path in reversed(paths)}",
    ),
    "the analyzer is not mended": ('dump["pg_config"] = {n:', 'dump["pg_names"] = {n:'),
    "DETAIL is not set": ('"DETAIL" if run.kind == "detail" else "OFF"', '"OFF"'),
    "the roll is called elsewhere": (
        "line = lines.most_common(1)[0][0] if lines else",
        "line =",
    ),
    "nobody calls the roll": (
        "    dist.monitored_barrier(gloo_group, timedelta(seconds=seconds), wait_all_ranks=True)",
        "    pass",
    ),
    "the matrix is written and not measured": (
        CELL,
        '{"verdict": dict(zip(TOOLS, EXPECTED.get(name, "nothing " * 6).split()))[tool]}',
    ),
    "a tool names whom it likes": (
        '    return "guilty" if guilty.issuperset(finding.ranks) else "victim"',
        '    return "guilty"',
    ),
    "the job and not the ranks is judged": (
        "ends[name]] == [0] * args.nproc]",
        "ends[name]] != []]",
    ),
}
FOR_FOUR = {name: BREAKS[name] for name in list(BREAKS)[:8]}


def test_each_break_ends_in_fail():
    check_breaks(19, BREAKS, 3, "--limit", 2)


def test_breaks_of_reading_end_in_fail_on_four_ranks_too():
    check_breaks(19, FOR_FOUR, 4, "--limit", 2)
