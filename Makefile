# Each goal sets up .venv by itself; it is done again when constraints.txt or pyproject.toml change.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
MODEL ?= tiny-ouro
BIN := .venv/bin
READY := .venv/ready
TORCH := torch==2.13.0
QUICK := not gpu and not soak and not index and not ray
CONFIG_tiny-ouro := configs/local-cpu.yaml
CONFIG_tiny-huginn := configs/local-cpu-huginn.yaml

# The tests and the demo run small matrices in several processes: one thread each.
export OMP_NUM_THREADS := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore

.PHONY: demo test check soak ray proto clean
.DEFAULT_GOAL := test

demo: $(READY)
	@test -n "$(CONFIG_$(MODEL))" || { echo "MODEL is $(MODEL); allowed: tiny-ouro, tiny-huginn" >&2; exit 2; }
	$(BIN)/loopline demo $(CONFIG_$(MODEL))

# Clusters are several processes each and come last, two at a time: most of what they take is waiting. All else shares the
# processors.
test: check
	$(BIN)/pytest -m "$(QUICK)" -n auto --maxprocesses 4 --dist loadfile --ignore tests/cluster
	$(BIN)/pytest -m "$(QUICK) and not alone" -n 2 --dist loadfile tests/cluster
	$(BIN)/pytest -m "$(QUICK) and alone" tests/cluster

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m loopline.wire.protogen --check

# Long runs: the tests marked soak, and the property tests with more examples.
soak: $(READY)
	LOOPLINE_SOAK=1 $(BIN)/pytest -m "not gpu" --timeout 3600 tests/property
	LOOPLINE_SOAK=1 $(BIN)/pytest -m "soak and not gpu" --timeout 3600 --log-cli-level INFO

# Clusters of Ray's nodes; Ray is large, and an extra.
ray: $(READY)
	$(BIN)/pip install -q -c constraints.txt ray
	$(BIN)/pytest -m ray tests/cluster/test_ray.py

proto: $(READY)
	$(BIN)/python -m loopline.wire.protogen

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and alone, so that pip takes whichever build of this version the machine offers.
$(READY): constraints.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q $(TORCH)
	$(BIN)/pip install -q -c constraints.txt setuptools
	$(BIN)/pip install -q -c constraints.txt $$($(BIN)/python -c "$$REQUIREMENTS")
	$(BIN)/pip install -q --no-deps --no-build-isolation -e .
	touch $@

define REQUIREMENTS
import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
print(*project["dependencies"], *project["optional-dependencies"]["dev"])
endef
export REQUIREMENTS
