# Each target does its own set-up, so `make demo` and `make test` work in a fresh checkout.
# PYTHON=python3.13 chooses the interpreter for a new .venv; PYTEST_ARGS="-k name" narrows the tests.

BIN := .venv/bin

.PHONY: help setup demo test check clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-6s  %s\n", $$1, $$2}' Makefile

setup: ## make .venv with all that development needs, and find or install a Vulkan driver
	@.ci/setup.sh test

demo: ## run a convolution on this machine's best device and show what happened
	@.ci/setup.sh demo
	@.ci/with-env.sh $(BIN)/wgpuconv demo

# The tests run even when the linters complain: one run then shows everything there is to mend.
test: ## run the linters, the type checker and the tests
	@.ci/setup.sh test
	@status=0; \
	$(MAKE) --no-print-directory check || status=$$?; \
	if $(BIN)/python -c 'import xdist' 2>/dev/null; then jobs='-n 2'; else jobs=; fi; \
	.ci/with-env.sh $(BIN)/python -m pytest $$jobs $(PYTEST_ARGS) || exit $$?; \
	[ $$status -eq 0 ] || echo 'make test: the tests passed, "make check" did not (see above)' >&2; \
	exit $$status

check: ## run the linters and the type checker only
	@.ci/setup.sh check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean: ## remove .venv and every build product and cache (system packages stay)
	rm -rf .venv build dist .benchmarks .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
