// SPDX-License-Identifier: Apache-2.0
#include "base/result.h"

#include <cerrno>

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

ErrorCode SettingError(int error) noexcept {
    switch (error) {
        case EACCES:
        case EADDRNOTAVAIL:
        case EAFNOSUPPORT:
        case EINVAL:
        case EISDIR:
        case ELOOP:
        case ENAMETOOLONG:
        case ENODEV:  // libzmq: the name of an interface or host that does not exist
        case ENOENT:
        case ENOTDIR:
        case EPERM:
        case EROFS:
            return ErrorCode::kInvalidArgument;
        default:
            return ErrorCode::kUnavailable;
    }
}

std::string_view OpenAiType(ErrorCode code) noexcept {
    return RowOf(code).type;
}
std::string_view OpenAiCode(ErrorCode code) noexcept {
    return RowOf(code).code;
}

}  // namespace rankgate
