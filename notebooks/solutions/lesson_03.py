"""The exercise of lesson 03: the accuracy of all ranks, with every test image counted once."""

import torch
import torch.distributed as dist
from nbtools import run


def solution(rank, world_size, model, test_set):
    """Return the accuracy on `test_set`, the same number on every rank (claim C3)."""
    part = test_set[rank::world_size]
    right = sum(model(image) == label for image, label in part)
    counts = torch.tensor([right, len(part)])
    dist.all_reduce(counts)  # two integers from each rank; their sums come back to all
    return counts[0].item() / counts[1].item()


class Model:
    """Answers with a digit, and remembers the images it was asked about."""

    def __init__(self):
        self.asked = []

    def __call__(self, image):
        self.asked.append(image)
        return image % 10


def make_test_set(images, wrong):
    """Return [(image, label)]: the model is wrong about the first `wrong` of them only."""
    return [(image, (image + (image < wrong)) % 10) for image in range(images)]


def examine(rank, world_size, attempt, test_set):
    """Run the attempt on this rank; return what it returned, and which images it used."""
    model = Model()
    return attempt(rank, world_size, model, test_set), model.asked


def check(attempt, nproc=2):
    """Return None if the attempt is right, else one sentence about what is wrong."""
    # Sizes that `nproc` does not divide, and one with fewer images than ranks.
    for images, wrong in ((12 * nproc + 1, 5), (10 * nproc - 1, 3), (1, 0)):
        test_set = make_test_set(images, wrong)
        answers = run(examine, nproc, attempt, test_set, deadline=60)
        place = f"with {images} images and {nproc} ranks"
        asked = sorted(image for _, used in answers for image in used)
        if asked != list(range(images)):
            return f"{place} the model was asked {len(asked)} times: it needs each image once"
        shares = [len(used) for _, used in answers]
        if max(shares) - min(shares) > 1:
            return f"{place} the shares are {shares}: they must differ by one image at most"
        expected = (images - wrong) / images
        for rank, (accuracy, _) in enumerate(answers):
            if not isinstance(accuracy, (int, float, torch.Tensor)):
                return f"{place} rank {rank} returned {type(accuracy).__name__}, not a number"
            if abs(accuracy - expected) > 1e-6:
                return (
                    f"{place} rank {rank} returned {float(accuracy):.3f}, not {expected:.3f}: "
                    "compare what you add up with what you divide by"
                )
    return None
