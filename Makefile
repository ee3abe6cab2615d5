# What there is to type. ARGS go to pytest or to the program: make fast ARGS="-k plan"
# tests/README.md says more of the tests.
.PHONY: fast test loaded lint demo docs bench
ARGS =
BENCH = logs doctor engine  # or: make bench BENCH=faults ARGS="--peers DIR"

fast:
	./scripts/test.sh --fast $(ARGS)

test:
	./scripts/test.sh $(ARGS)

loaded:
	./scripts/test.sh --load 10 $(ARGS)

lint:
	./scripts/lint.sh

docs:
	./scripts/docs.sh $(ARGS)

demo:
	./scripts/demo.sh $(ARGS)

bench:
	set -e; for name in $(BENCH); do .venv/bin/python scripts/bench/$$name.py $(ARGS); done
