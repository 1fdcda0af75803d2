"""Lesson 06: checkpoints that survive a kill, and from which a job goes on with the same bits."""

import pytest
from breaks import check_breaks

BREAKS = {
    "the model is left out": ('{"model": model, "optimizer"', '{"optimizer"', (2,)),
    "the momentum is left out": ('"optimizer": optimizer, ', "", (2,)),
    "the schedule is left out": (', "schedule": schedule}', "}", (2,)),
    "the position is lost": ('now = saved["now"]', "pass"),
    "the epoch is lost": ('now = saved["now"]', 'now = saved["now"] | {"epoch": 0}', (2,)),
    "the rows are lost": ('now = saved["now"]', 'now = saved["now"] | {"rows": 0}', (2,)),
    "torch's random state is lost": ('torch.set_rng_state(states["torch"])', "pass", (2,)),
    "NumPy's random state is lost": ('np.random.set_state(states["numpy"])', "pass", (2,)),
    "Python's random state is lost": ('random.setstate(states["random"])', "pass", (2,)),
    "rank 0's random states for all": ('saved["random"][rank]', 'saved["random"][0]'),
    "random states before the last draw": (
        'set_random_states(saved["random"][rank])  #',
        'set_random_states(saved["random"][rank]); torch.rand(1)  #',
        (2,),
    ),
    "no set_epoch": ("sampler.set_epoch(now", "(lambda _: None)(now"),
    "one seed of the sampler for each rank": ("seed=seed)", "seed=seed + rank)"),
    "another first sum": ("replica(data[0][0][None].to(device)).sum().backward()", "pass", (4,)),
    "no name of its own while it writes": ('path.with_suffix(".unfinished")', "path", (2,)),
    "the name before the data": (
        "        torch.save(state, file)  # from Python to the operating system\n        os.fsync(file.fileno())  # and to the disk, before the name is there\n    os.replace(unfinished, path)",
        "        os.replace(unfinished, path)\n        torch.save(state, file)\n        os.fsync(file.fileno())",
        (2,),
    ),
    "no fsync of the file": ("os.fsync(file.fileno())", "pass", (2,)),
    "no fsync of the folder": ("os.fsync(folder)", "pass", (2,)),
    "the old file is removed first": (
        "    os.replace(unfinished, path)",
        "    path.unlink(missing_ok=True)\n    os.replace(unfinished, path)",
        (2,),
    ),
    "every rank writes the same name": (
        "    if dist.get_rank() == 0:\n        state = {name",
        "    if True:\n        state = {name",
    ),
    "nobody waits for the file": ("dist.barrier()  # nobody goes on before", "pass  #"),
    "only one is kept": ("keep=2", "keep=1", (2,)),
    "all are kept": ("older[:-keep]", "[]", (2,)),
    "each rank loads what it finds": (
        "    if dist.get_rank() == 0:\n        choice = choose(folder)\n    dist.broadcast_object_list(choice)\n",
        "    choice = choose(folder)\n",
    ),
    "other bytes under the same name": ("own != digest", "False"),
    "a rank that sees none starts anew": (
        "if name not in here:",
        "if not here:\n        return None\n    if name not in here:",
        (2,),
    ),
    "only the rank that fails leaves": (
        "dist.all_gather_object(problems, problem)",
        "problems[dist.get_rank()] = problem",
    ),
    "no map_location": ('map_location="cpu", ', "", (2,)),
    "checksums are not compared": ("zipfile.ZipFile(file).testzip()", "False", (2,)),
    "the latest, damaged or not": ("for path in found:", "for path in found[:1]:", (2,)),
    "DDP's own keys": ('{"model": model, "opt', '{"model": replica, "opt', (2,)),
}


@pytest.mark.parametrize("nproc", (2, 3, 4))
def test_each_break_ends_in_fail(nproc):
    check_breaks(6, BREAKS, nproc, "--seed", 1)
