"""What grading costs, and how often it is wrong.

Each part stands in a module of its own: speed of the math grader (``_grade_math``), of the code grader
(``_grade_code``), what grading a repair costs around its tests (``_grade_swe``), what checking it costs on twenty real
projects (``_grade_projects``; needs a package index), and false positives and negatives on the labelled corpora in
``tests/corpora``, the half that was written without sight of the graders apart (``_grade_corpora``, ``_grade_stem``,
``_grade_programs``). ``--short`` measures a tenth.
"""

import asyncio
import json

import _grade_code
import _grade_corpora
import _grade_math
import _grade_programs
import _grade_projects
import _grade_stem
import _grade_swe
from _report import Figure, Report, StartConditions, report

PARTS = (_grade_math, _grade_code, _grade_swe, _grade_projects, _grade_corpora, _grade_stem, _grade_programs)


async def measure_all() -> list[Figure]:
    """Return the figures of all parts, one after the other."""
    return [each for part in PARTS for each in await part.run()]


def run() -> Report:
    """Measure."""
    begun = StartConditions.capture()
    return report("grade", asyncio.run(measure_all()), "math-verify", "sympy", begun=begun)


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
