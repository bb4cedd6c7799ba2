#!/usr/bin/env bash
# Installs what a purpose needs and is missing: bootstrap.sh serve|test|lint|fuzz|docs|lanes|deb
# Root is used for Debian packages only; without it the exact command is printed and the script stops.
set -euo pipefail

purpose=${1:?usage: bootstrap.sh serve|test|lint|fuzz|lanes}

build=(ca-certificates make g++ cmake ninja-build ccache python3 python3-pip python3-venv unzip
       libboost1.81-dev libboost-json1.81-dev libzmq3-dev cppzmq-dev libsimdjson-dev
       libcli11-dev libtomlplusplus-dev libssl-dev)
case "$purpose" in
    serve) packages=("${build[@]}") ;;
    test) packages=("${build[@]}" libgtest-dev libbenchmark-dev curl) ;;
    fuzz) packages=("${build[@]}" clang-16 libclang-rt-16-dev llvm) ;;
    lint) packages=("${build[@]}" libgtest-dev libbenchmark-dev clang-16 clang-format-16 clang-tidy-16) ;;
    lanes) packages=("${build[@]}" curl) ;;
    bench) packages=("${build[@]}" libbenchmark-dev valgrind) ;;
    *) echo "bootstrap: unknown purpose '$purpose'" >&2; exit 2 ;;
esac

missing=()
for package in "${packages[@]}"; do
    if [ "$(dpkg-query -W -f='${db:Status-Abbrev}' "$package" 2>/dev/null | cut -c1-2)" != "ii" ]; then
        missing+=("$package")
    fi
done

if [ ${#missing[@]} -gt 0 ]; then
    if [ "$(id -u)" -ne 0 ]; then
        echo "bootstrap: these packages are missing; install them and run this again:" >&2
        echo "    sudo apt-get update && sudo apt-get install -y --no-install-recommends ${missing[*]}" >&2
        exit 1
    fi
    echo "==> installing ${#missing[@]} packages: ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    # A mirror hiccup is the commonest failure of a first run: three tries, then the error as it is.
    for try in 1 2 3; do
        if apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}" >build-apt.log 2>&1; then
            rm -f build-apt.log
            break
        fi
        [ "$try" = 3 ] && { tail -20 build-apt.log >&2; echo "bootstrap: apt-get failed, see build-apt.log" >&2; exit 1; }
        sleep 5
    done
fi

# cargo >= 1.85 builds the tokenizer library for tokenizer.json models; Debian's own cargo is too old, cargo-web is not.
have_cargo() {
    command -v cargo >/dev/null 2>&1 || return 1
    local version
    version=$(cargo --version 2>/dev/null | sed -E 's/^cargo ([0-9]+)\.([0-9]+).*/\1 \2/') || return 1
    read -r major minor <<<"$version"
    [ "${major:-0}" -gt 1 ] || { [ "${major:-0}" -eq 1 ] && [ "${minor:-0}" -ge 85 ]; }
}
if [ "$purpose" != serve ] && [ "$purpose" != fuzz ] && ! have_cargo; then
    if [ "$(id -u)" -ne 0 ]; then
        echo "bootstrap: cargo 1.85 or newer is missing:  sudo apt-get install -y --no-install-recommends cargo-web rustc-web" >&2
        exit 1
    fi
    echo "==> installing cargo-web (cargo >= 1.85)"
    apt-get install -y -qq --no-install-recommends cargo-web rustc-web >/dev/null
fi
