// SPDX-License-Identifier: Apache-2.0
#include "base/result.h"

namespace rankgate {
namespace {

struct Row {
    int status;
    std::string_view type;
    std::string_view code;
};

constexpr Row kRows[] = {
#define RG_ERROR(name, status, type, code) {status, type, code},
#include "base/errors.def"
#undef RG_ERROR
};

const Row& RowOf(ErrorCode code) noexcept {
    return kRows[static_cast<std::size_t>(code)];
}

}  // namespace

int HttpStatus(ErrorCode code) noexcept {
    return RowOf(code).status;
}
std::string_view OpenAiType(ErrorCode code) noexcept {
    return RowOf(code).type;
}
std::string_view OpenAiCode(ErrorCode code) noexcept {
    return RowOf(code).code;
}

}  // namespace rankgate
