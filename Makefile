.PHONY: check format lint types layers test bench

check: format lint types layers test

format:
	ruff format --check .

lint:
	ruff check .

types:
	mypy

layers:
	lint-imports

test:
	python -m pytest --quiet -n auto --dist worksteal

bench:
	env -u OPENBLAS_CORETYPE -u OPENBLAS_L2_SIZE python tools/bench/decode.py
	env -u OPENBLAS_CORETYPE -u OPENBLAS_L2_SIZE python tools/bench/paged.py
	python tools/bench/sessions.py
