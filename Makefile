# Every target sets itself up, so a fresh clone needs nothing but Python and make.

PYTHON ?= python3
VENV   ?= .venv
JOBS   ?= 2
TASK   ?=
OUTPUT ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt

EXTRAS := dev,zoo,text,export,serve,ray,api,providers,langchain,sklearn,diffusers,mlflow,otel,train

AUDIT := $(VENV)-audit
PIP_AUDIT := $(AUDIT)/bin/pip-audit --no-deps --disable-pip --strict

# The library stands before the zoo: pip then takes the zoo's `swiftsure` from this folder.
DEMO_INSTALLED := $(VENV)/.installed-demo
INSTALLED := $(VENV)/.installed
DOCS := $(VENV)-docs
RELEASE := $(VENV)-release

.DEFAULT_GOAL := help
.PHONY: help setup demo browser test test-slow check format audit bench docs docs-version dist reproduce clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(INSTALLED) ## Create the virtual environment and install the library with its tools
	@echo "Ready: $(VENV)"

demo: $(DEMO_INSTALLED) ## Run the demonstrations: images, then text
	@$(BIN)/swiftsure demo
	@echo
	@$(BIN)/swiftsure translate
	@echo
	@echo "For an alarm drill in a browser: $(BIN)/swiftsure serve --demo --drift"

browser: $(INSTALLED) ## Run the certified network in your browser; needs npm
	@npm install --prefix examples/browser --no-package-lock --no-audit --no-fund --loglevel=error
	@$(BIN)/python examples/browser/page.py

test: check ## Check the code, then run the tests
	$(BIN)/python -m pytest -m "not slow" -n $(JOBS)

test-slow: $(INSTALLED) ## Run the long tests: of the guarantees, and of what is shipped
	$(BIN)/python -m pytest -m slow -n $(JOBS)

check: $(INSTALLED) ## Check format, style, types and the import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(INSTALLED) ## Format the code and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

audit: ## Look up known vulnerabilities of the pinned versions; needs the internet
	@test -x $(AUDIT)/bin/pip-audit || { $(PYTHON) -m venv $(AUDIT) \
	  && $(AUDIT)/bin/python -m pip install --quiet --disable-pip-version-check pip-audit; }
	@# pip-audit takes silence for safety, so it is first asked for a version known to be vulnerable.
	@echo "jinja2==3.1.5" > $(AUDIT)/known.txt
	@if $(PIP_AUDIT) --requirement $(AUDIT)/known.txt >/dev/null 2>$(AUDIT)/known.log \
	  || ! grep -q "known vulnerabilit" $(AUDIT)/known.log; then \
	  echo "Nothing was audited: the advisories cannot be reached." >&2; exit 2; fi
	$(PIP_AUDIT) --requirement constraints.txt

bench: $(INSTALLED) ## Measure speed and memory
	$(BIN)/python benchmarks/run.py

docs: $(DOCS)/.installed ## Build the documentation into site/, without PyTorch
	$(DOCS)/bin/mkdocs build --strict

docs-version: $(DOCS)/.installed ## Commit this version's documentation to the branch gh-pages and push it
	$(DOCS)/bin/mike deploy --push --update-aliases "$$(sed -n 's/^__version__ = "\(.*\)"/\1/p' src/swiftsure/_version.py)" latest
	$(DOCS)/bin/mike set-default --push latest

dist: $(RELEASE)/.installed ## Build both distributions in dist/ and check them
	rm -rf dist
	$(RELEASE)/bin/python -m hatchling build -d dist
	cd zoo && ../$(RELEASE)/bin/python -m hatchling build -d ../dist
	$(RELEASE)/bin/twine check --strict dist/*

reproduce: $(INSTALLED) ## Write the paper's tables and figures; TASK=calm for one, OUTPUT=folder
	$(BIN)/python -m experiments.reproduce $(TASK) $(if $(OUTPUT),--output $(OUTPUT))

clean: ## Remove caches and build products; the virtual environment stays
	rm -rf build dist site $(AUDIT) $(DOCS) $(RELEASE) .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -path './$(VENV)' -prune -o -path ./.git -prune -o -type d -name __pycache__ -exec rm -rf {} +

$(DEMO_INSTALLED): pyproject.toml zoo/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Swiftsure needs Python 3.11 or newer; set PYTHON=/path/to/it." >&2; exit 1; }
	@echo "Setting up $(VENV): the library, pinned by constraints.txt (a minute or two)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) -e '.[zoo,text,serve]' -e zoo
	@touch $@

$(INSTALLED): $(DEMO_INSTALLED)
	@echo "Adding the tools and all extras to $(VENV)"
	@$(PIP) -e '.[$(EXTRAS)]' -e zoo
	@touch $@

$(DOCS)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

$(RELEASE)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -m venv $(RELEASE)
	@$(RELEASE)/bin/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt hatchling twine
	@touch $@
