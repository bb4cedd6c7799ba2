// SPDX-License-Identifier: Apache-2.0
// Real templates against the reference library's renderings: tests/text/run_template_matrix.sh builds and
// runs it.
#include <cstdio>

#include "text/template_goldens_for_tests.h"

int main(int argc, char** argv) {
    if (argc < 2) {
        std::fprintf(stderr, "usage: text_template_lane CASES.json [allowed differences]\n");
        return 2;
    }
    // Measured once with the pinned templates; a change for the worse fails the lane.
    const long allowed = argc > 2 ? std::strtol(argv[2], nullptr, 10) : 0;
    long different = 0;
    const std::size_t cases = rankgate::text::goldens::Compare(
        argv[1], [&](const std::string&, bool same, const std::string& report) {
            if (!same) {
                ++different;
                std::printf("%s\n\n", report.c_str());
            }
        });
    std::printf("templates: %ld of %zu cases differ\n", different, cases);
    return cases > 0 && different <= allowed ? 0 : 1;
}
