# Everything runs in .venv, which `make setup` makes and keeps up to date.
VENV ?= .venv
PYTHON ?= $(firstword $(shell command -v python3 python 2>/dev/null))
RUN = $(VENV)/bin
# Tests start sandboxes and servers and some measure time: more workers than cores make them fail.
WORKERS ?= 2
IN_PARALLEL = -n $(WORKERS) --dist loadgroup
export VENV
# With it, each start of a test worker or a server compiles everything again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo learn test test-all release-check lint docs dist clean

help:
	@echo "make demo                             roll out four environments through NeMo Gym (no GPU, no model needed)"
	@echo "make demo BASE_URL=http://h:8000/v1 MODEL=name [TOKENIZER=dir]    the same against a vLLM server"
	@echo "make learn [DOMAIN=math|code|stem|swe] [LEARN_FLAGS=--short]   train a tiny policy from nothing (CPU, 8 minutes)"
	@echo "make test [WORKERS=0]                 the default test suite (no network, GPU or root needed); 0: in one process"
	@echo "make test-all                         every test; PRORL_GYM_REQUIRE=apptainer,gym makes a missing one fail"
	@echo "make release-check [PARTS='products gym']  what .ci/run plays in part, whole: under two hours; each part runs alone"
	@echo "make lint                             ruff and pyright"
	@echo "make docs                             the documentation as a site, in site/"
	@echo "make dist                             wheel and sdist, checked, in dist/"
	@echo "make setup, make clean                make / remove .venv"

setup:
	@$(PYTHON) scripts/setup.py

demo: setup
	@$(RUN)/prorl-gym demo $(if $(BASE_URL),--base-url "$(BASE_URL)") $(if $(MODEL),--model "$(MODEL)") \
		$(if $(TOKENIZER),--tokenizer "$(TOKENIZER)") $(DEMO_FLAGS)

DOMAIN = math
# In an environment of its own (Python 3.11, torch for CPU), which imports the client from this checkout.
learn: setup
	@python="$$(recipes/tiny_dapo/environment)" && PYTHONPATH="$(CURDIR)" exec "$$python" recipes/tiny_dapo/learn.py \
		--service "$(RUN)/prorl-gym" --domain $(DOMAIN) $(LEARN_FLAGS)

test: setup
	@$(RUN)/python -m pytest $(IN_PARALLEL) $(PYTEST_FLAGS)

test-all: setup
	@$(RUN)/python -m pytest --all $(IN_PARALLEL) $(PYTEST_FLAGS)

release-check: setup
	@.ci/release-check $(PARTS)

lint: setup
	@$(RUN)/ruff check . && $(RUN)/ruff format --check . && $(RUN)/pyright --pythonpath $(RUN)/python && \
		$(RUN)/pyright -p tests --pythonpath $(RUN)/python && \
		if python="$$(recipes/tiny_dapo/environment --existing)"; \
		then $(RUN)/pyright -p recipes/tiny_dapo --pythonpath "$$python"; \
		else echo "recipes/tiny_dapo is not checked: its environment is made by make learn"; fi

docs: setup
	@.ci/docs

dist: setup
	@python="$$(.ci/environment release)" && exec "$$python" scripts/release.py

clean:
	rm -rf $(VENV) dist build site .pytest_cache .ruff_cache
