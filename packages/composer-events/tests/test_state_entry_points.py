"""What neighbouring packages lend to `State`, tried with small distributions of our own on the path."""

import subprocess
import sys
import textwrap

import pytest


@pytest.fixture
def run_with_distribution(tmp_path):
    """Run code where a distribution with the given entry points and module is installed, and nothing shadows it."""

    def run(entry_points, module, code):
        info = tmp_path / "lender-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lender\nVersion: 1\n")
        (info / "entry_points.txt").write_text(textwrap.dedent(entry_points))
        (tmp_path / "lender.py").write_text(textwrap.dedent(module))
        program = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{textwrap.dedent(code)}"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.split("\n")[:-1]

    return run


def test_names_of_devices_and_precisions_become_objects_where_a_package_lends_them(run_with_distribution):
    lines = run_with_distribution(
        """
        [composer_events.state]
        device = lender:get_device
        precision = lender:Precision
        """,
        """
        def get_device(name): return ("device", name)
        def Precision(name): return ("precision", name)
        """,
        """
        from composer_events import State
        state = State(None, 0, device="cpu", precision="amp_bf16")
        print(state.device, state.precision)
        marker = object()
        state.precision = marker
        print(state.precision is marker, State(None, 0, device=marker).device is marker)
        """,
    )
    assert lines == ["('device', 'cpu') ('precision', 'amp_bf16')", "True True"]


def test_a_state_that_needs_neither_does_not_ask_for_them(run_with_distribution):
    lines = run_with_distribution(
        """
        [composer_events.state]
        device = lender:get_device
        precision = lender:Precision
        """,
        "raise RuntimeError('this must not be imported')",
        """
        import sys
        from composer_events import State
        state = State(None, 0)
        print(state.device, state.precision, "lender" in sys.modules, "torch" in sys.modules)
        """,
    )
    assert lines == ["None fp32 False False"]


def test_algorithms_that_a_checkpoint_requires_are_looked_up_in_packages_that_name_themselves(run_with_distribution):
    lines = run_with_distribution(
        """
        [composer_events.algorithms]
        lender = lender
        """,
        """
        from composer_events import Algorithm
        __all__ = ["Surgery", "not_an_algorithm"]
        class Surgery(Algorithm):
            def __init__(self, depth): self.depth = depth
            def __repr__(self): return f"Surgery(depth={self.depth})"
            @staticmethod
            def required_on_load(): return True
            def match(self, event, state): return True
            def apply(self, event, state, logger): print("applied", self)
        not_an_algorithm = print
        """,
        """
        import warnings
        from types import SimpleNamespace
        from composer_events import State
        warnings.simplefilter("ignore")
        class Model:
            def state_dict(self): return {}
            def load_state_dict(self, state, strict): return SimpleNamespace(missing_keys=[], unexpected_keys=[])
        state = State(Model(), 0)
        names = ["Surgery", "not_an_algorithm", "missing"]
        saved = [(name, {"repr": f"{name}(depth=2)"}) for name in names]
        state.load_model_state({"model": {}, "algorithms": saved}, None, True)
        print(list(state.algorithms))
        """,
    )
    assert lines == ["applied Surgery(depth=2)", "[Surgery(depth=2)]"]
