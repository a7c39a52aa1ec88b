"""One rank fails: what it tells, and how it ends the job."""

import pytest

from collective.training.failure import ends_the_job


class Aborted(Exception):
    pass


class Rank:
    """Rank 1 of 2; notes the exit code that it ends the job with."""

    rank, size = 1, 2

    def ended_by_another(self, error):
        return None

    def abort(self, exit_code):
        self.exit_code = exit_code
        raise Aborted


@pytest.mark.parametrize(
    "error, code, message",
    [
        (KeyboardInterrupt(), 130, "rank 1: interrupted"),
        (KeyError("x"), 1, "rank 1: KeyError ended the job"),
    ],
)
def test_a_rank_that_fails_ends_the_job(error, code, message, capfd):
    rank = Rank()
    with pytest.raises(Aborted), ends_the_job(rank):
        raise error
    assert rank.exit_code == code
    printed = capfd.readouterr().err
    assert message in printed
    assert ("Traceback" in printed) == (code == 1)
