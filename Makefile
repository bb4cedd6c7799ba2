# rankgate. The two commands that must always work:  make serve   make test
# Every target is idempotent, says what it is doing, and asks for root only to install packages.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PORT ?= 8000
HOST ?= 127.0.0.1
MODEL ?=
ARGS ?=
PRESET ?= release
FILTER ?=
FUZZ_SECONDS ?= 60
PEERS ?=
JOBS ?= $(shell nproc)
export PORT HOST MODEL ARGS PRESET FILTER FUZZ_SECONDS PEERS JOBS

.PHONY: help serve test build test-asan test-tsan test-asan-short test-tsan-short fuzz test-vllm test-vllm-short test-tokenspeed test-tokenspeed-short test-sdk \
	test-text test-judges test-relay test-soak bench bench-relay wheel deb lint docs clean

help: ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/\1\t\2/' | expand -t 18

serve: ## build a release, get the demo model, start engine and gateway, print a curl line (PORT HOST MODEL ARGS)
	@scripts/serve.sh

test: ## install, build and run every test (FILTER=regex)
	@scripts/test.sh

build: ## build/$(PRESET)/rankgate
	@scripts/build.sh $(PRESET) rankgate

test-asan: ## unit tests and fuzz seeds under AddressSanitizer and UBSan
	@scripts/sanitize.sh asan

test-tsan: ## unit tests under ThreadSanitizer
	@scripts/sanitize.sh tsan

test-asan-short: ## the process suites under ASan and UBSan (what CI runs)
	@scripts/sanitize.sh asan short

test-tsan-short: ## threaded unit tests and stream and fault suites under TSan (what CI runs)
	@scripts/sanitize.sh tsan short

fuzz: ## every fuzz target for FUZZ_SECONDS
	@scripts/fuzz.sh

test-vllm: ## the gateway in front of real vLLM engines on CPU
	@scripts/lanes/vllm.sh full

test-vllm-short: ## a short form of test-vllm
	@scripts/lanes/vllm.sh short

test-tokenspeed: ## the gateway in front of the real TokenSpeed event loop
	@scripts/lanes/tokenspeed.sh full

test-tokenspeed-short: ## a short form of test-tokenspeed
	@scripts/lanes/tokenspeed.sh short

test-sdk: ## the official OpenAI SDKs (Python, Node) against the gateway
	@scripts/lanes/sdk.sh

test-text: ## real tokenizer.json files of seven model families against their reference (downloads 100 MB)
	@scripts/bootstrap.sh test && scripts/build.sh dev text_tokenizers_lane && tests/text/run_tokenizers.sh

test-judges: ## other people's conformance suites against the gateway
	@scripts/lanes/judges.sh

test-relay: ## the long relay lane: cold starts, publish at once, soak
	@tests/relay/run_long.sh

bench: ## budgets against the floor; JSON in build/bench (PEERS=1 also runs a peer on the same ranks)
	@scripts/bench.sh

bench-relay: ## the relay against PUB/SUB and its kin; JSON in build/bench
	@bench/relay/run.sh

wheel: ## Python wheel with rankgate.relay into dist/
	@scripts/wheel.sh

deb: ## Debian package into dist/
	@scripts/deb.sh

lint: ## clang-format and clang-tidy
	@scripts/lint.sh

docs: ## check that the pages' links and commands exist
	@python3 scripts/check_docs.py

clean: ## remove build/ and dist/
	@echo "==> removing build/ and dist/"; rm -rf build dist
