#!/usr/bin/env bash
# A Debian package with the program, into dist/.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/build.sh release rankgate
mkdir -p dist
(cd build/release && cpack -G DEB -B ../../dist >/dev/null)
rm -rf dist/_CPack_Packages
ls -l dist/*.deb
