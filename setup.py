"""The simulator's compiled event loop; all else of the build is in pyproject.toml.

Optional: where there is no C compiler, or no Python headers, the simulator runs its Python loop.
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "predict.simulation.engine.engine_compiled",
            ["predict/simulation/engine/engine_compiled.c"],
            optional=True,
            py_limited_api=True,
        )
    ],
    # The wheel is named as the extension is built: for every Python from 3.11 on.
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
