"""Settings that the core reads from the environment."""

import pytest

from tests.collective.unlaunched_ranks import PRELUDE, Ranks
from tests.launch import STARTS_RANKS

pytestmark = STARTS_RANKS


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("COLLECTIVE_TIMEOUT", "soon", "COLLECTIVE_TIMEOUT=soon is no time"),
        ("COLLECTIVE_SIMD", "avx", "COLLECTIVE_SIMD=avx is not known"),
        ("COLLECTIVE_STORES", "fast", "COLLECTIVE_STORES=fast is not known"),
    ],
)
def test_refuses_settings_that_it_does_not_know(variable, value, message):
    [(code, _, err)] = Ranks(1, PRELUDE, **{variable: value}).finish()
    assert code == 1 and message in err and "HINT: " in err


def test_an_infinite_time_is_never_over():
    late = (
        PRELUDE
        + """
    time.sleep(1.5 * (rank == 0))
    print(collective.allreduce(np.ones(3) + rank, collective.Sum))
    """
    )
    infinite = {"COLLECTIVE_TIMEOUT": "inf", "COLLECTIVE_STALL_SECONDS": "inf"}
    for code, out, err in Ranks(2, late, **infinite).finish():
        assert code == 0 and out.strip() == "[3. 3. 3.]", out + err
        assert "no progress" not in err
