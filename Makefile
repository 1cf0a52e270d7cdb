# Two commands do everything: `make demo` and `make test`. Both make their own virtual environment in .venv.
# Paths stay relative and every tool runs as `python -m`, so a folder name with a space is no trouble.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
TESTS := $(PY) -m pytest -n auto --dist worksteal
PIP := $(PY) -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: help demo test fast gate nightly browser chromium contracts faults fuzz audit dist lint docs site mutants \
        costs constraints clean
.DEFAULT_GOAL := help

help:  ## what can be made
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo: $(VENV)/demo.ready  ## set up, then watch a language model learn by GRPO (three minutes)
	$(PY) -m creditscope lab demo

test: $(VENV)/test.ready chromium lint  ## set up, then linters, the tests of every change, mutants of changed files
	$(TESTS) -m "not nightly"
	$(PY) tests/mutants.py --changed

fast: $(VENV)/test.ready  ## the tests that take no time (a minute)
	$(TESTS) tests -m "not slow and not nightly and not conformance and not browser"

gate: $(VENV)/test.ready $(VENV)/site.ready chromium  ## with `make test`, all that a change must pass before it lands
	CREDITSCOPE_DEPTH=full $(TESTS) -m "nightly or deep"
	$(PY) tests/mutants.py

nightly: gate contracts faults fuzz  ## the gate, then what takes an hour: TRL's other version, kills, fuzzing

costs: $(VENV)/test.ready chromium  ## wall and CPU seconds of every test file
	$(TESTS) -m "not nightly" -p cost --cost costs.json

browser: $(VENV)/test.ready chromium  ## the tests that open the report in a browser
	$(PY) -m pytest -n auto -m browser

chromium:
	@bash tests/browser/chromium.sh

# Each version of TRL in an environment of its own; torch first, as below.
contracts:  ## the TRL plugin on each version it was tested with
	mkdir -p .contracts
	grep -v '^trl==' constraints.txt > .contracts/constraints.txt
	for version in 1.14.2 1.16.0; do \
	  env=.contracts/trl-$$version; \
	  [ -x $$env/bin/python ] || $(PYTHON) -m venv $$env; \
	  install="$$env/bin/python -m pip --disable-pip-version-check install --quiet --constraint .contracts/constraints.txt"; \
	  $$install torch; \
	  $$install --editable '.[lora,test]' datasets trl==$$version; \
	  $$env/bin/python -m pytest tests/plugins/test_trl_contract.py tests/plugins/test_trl_ranks.py; \
	done

faults: $(VENV)/test.ready  ## a hundred kills, and the planted faults that they must notice (a quarter of an hour)
	$(PY) tests/faults/kills.py --kills 100 --controls no_rename no_whole_folders no_sync late_lines line_first

fuzz: $(VENV)/test.ready  ## a coverage-guided fuzzer on every reader, three minutes each
	$(PIP) --editable '.[fuzz]'
	for target in rollouts offline parquet record arrays evidence doctor task_files verifiers specs config; do \
	  $(PY) tests/fuzz/coverage_guided.py $$target --seconds 180; done

dist:  ## build wheel and sdist; install the wheel elsewhere without torch, then with the lab; run the sdist's tests
	PYTHON=$(PYTHON) bash .ci/dist

audit: $(VENV)/test.ready  ## known holes of the pinned versions (asks the advisory service)
	$(PYTHON) -m venv .audit
	.audit/bin/python -m pip install --quiet pip-audit
	.audit/bin/pip-audit --strict --no-deps --disable-pip -r constraints.txt
	$(PY) -m pip check

lint: $(VENV)/test.ready
	$(PY) -m ruff check .
	$(PY) -m mypy

docs: $(VENV)/test.ready  ## regenerate docs/methods.md, credit.md, claims.md, conformance.md, record.md, doctor.md, trainers.md, preferences.md, the verdicts in papers.md and the notebook's outputs
	$(PY) docs/generate.py
	$(PY) docs/execute.py

site: $(VENV)/site.ready  ## build the documentation site, with the gallery's reports, into site/
	rm -rf site
	$(PY) -m sphinx --quiet --fail-on-warning --keep-going --fresh-env -c docs -d build/doctrees . site

mutants: $(VENV)/test.ready  ## plant bugs in the formulas and count the tests that notice
	$(PY) tests/mutants.py

constraints: $(VENV)/test.ready  ## write the installed versions to constraints.txt
	@{ echo '# Exact versions that `make demo` and `make test` install. Regenerate with: make constraints'; \
	   $(PY) -m pip freeze --exclude-editable | sed 's/+cpu$$//'; } > constraints.new && mv constraints.new constraints.txt

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) site build .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(f"creditscope needs Python 3.11 or newer; this is {sys.version.split()[0]}. Try: make PYTHON=python3.12") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)

# torch first and alone: its CPU wheel must be in place before anything asks for a range of torch.
$(VENV)/demo.ready: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "installing creditscope into $(VENV) (a minute or two, once)"
	$(PIP) torch
	$(PIP) --editable '.[lab,plot]'
	@touch $@

$(VENV)/test.ready: $(VENV)/demo.ready
	@echo "installing the test environment into $(VENV)"
	$(PIP) --editable '.[lab,trl,lora,math,gguf,log,ray,plot,site,test,browser,lint]'
	@touch $@

$(VENV)/site.ready: $(VENV)/demo.ready
	@echo "installing what builds the site into $(VENV)"
	$(PIP) --editable '.[trl,plot,site]'
	@touch $@
