# Each target sets up what it needs, once, and says what it does. `make help` lists them.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
# Services, engines and ranks are many processes: without bytecode on disk each compiles vLLM's and Megatron's sources anew.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
CODE := omnifleet lib/refit/omnifleet_refit services/media/omnifleet_media services/rollout/omnifleet_rollout \
        services/reward/omnifleet_reward services/trainer/omnifleet_trainer
# One pytest run's options can be added to: make test ARGS="-k ledger -x"
ARGS ?=
BENCH ?= bench/demo_seeds.py bench/policy/backends.py bench/policy/unique_media.py bench/media/hit_path.py bench/media/dedup.py bench/media/growth.py bench/media/ingest.py \
         bench/refit/run.py bench/reward/scorers.py bench/rollout/gateway.py bench/trainer/ledger.py bench/trainer/asynchrony.py bench/trainer/asynchrony_engines.py bench/trainer/loss_memory.py

.PHONY: help demo test soak bench lint lint-types format env tools proto lock

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' Makefile

demo: env  ## train a tiny vision-language model through the four services, on this CPU
	@$(BIN)/omnifleet demo

test: env tools  ## every test that runs on a CPU (under 25 minutes on two cores)
	@echo "Testing: unit, contract and integration; real engines and processes included"
	@$(if $(ARGS),$(BIN)/python -m pytest -m "not soak and not gpu" $(ARGS),scripts/run_tests.sh)

soak: env tools  ## the long form of the tests (at most 60 minutes)
	@echo "Soaking: long runs with kills, scaling and restarts"
	@$(if $(ARGS),$(BIN)/python -m pytest -m "soak and not gpu" $(ARGS),scripts/run_tests.sh soak)

# GPU benches (bench/refit/run.py --device cuda, bench/rollout/engine_gpu.py) are run by hand: docs/benchmarks.md.
bench: env  ## the scripts behind docs/benchmarks.md that a CPU can run (hours; BENCH="path ..." picks)
	@for script in $(BENCH); do echo "== $$script"; $(BIN)/python $$script; done

lint: env  ## style, formatting and types
	@echo "ruff check";  $(BIN)/ruff check --quiet .
	@echo "ruff format"; $(BIN)/ruff format --quiet --check . || { echo "run: make format" >&2; exit 1; }
	@$(MAKE) lint-types
	@echo "pytest --collect-only"; $(BIN)/python -m pytest --collect-only --quiet --quiet >/dev/null || $(BIN)/python -m pytest --collect-only --quiet --quiet | tail -20

lint-types: env
	@echo "mypy --strict"; $(BIN)/mypy $(CODE)

format: env  ## apply the formatting that lint checks
	@$(BIN)/ruff check --quiet --fix-only . && $(BIN)/ruff format --quiet .

env:  ## make or refresh .venv (Python 3.11, about a minute)
	@scripts/setup_env.sh .venv

tools:  ## find or install Redis, Chromium, NeMo Gym and OpenEnv, which tests start
	@scripts/setup_test_tools.sh

proto: env  ## regenerate omnifleet/wire from proto/
	@$(BIN)/python scripts/generate_wire.py

lock:  ## resolve requirements/*.in again (scripts/lock.sh --upgrade moves the pins)
	@scripts/lock.sh
