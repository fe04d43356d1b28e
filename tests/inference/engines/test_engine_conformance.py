import pytest
from engine_cases import CASES

from prorl_gym.testing.inference.engine_conformance import CHECKS, Fault, check_fault


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_conformance(check, case):
    async with CASES[case]() as opened:
        await check(opened)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("fault", Fault, ids=lambda fault: fault.name.lower())
async def test_faults(fault, case):
    async with CASES[case]() as opened:
        await check_fault(opened, fault)
