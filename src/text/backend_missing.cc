// SPDX-License-Identifier: Apache-2.0
// Stands in for the back ends that this build was made without.
#include "text/backends.h"

namespace rankgate::text {

#ifndef RG_WITH_LLAMA
Result<GgufFacts> LoadGguf(const std::string& path) {
    return Error{
        ErrorCode::kNotImplemented,
        path + " is a GGUF file; this build has no llama.cpp (configure with -DRANKGATE_WITH_LLAMA=ON)",
        "model", false};
}
#endif

#ifndef RG_WITH_RUST
Result<std::shared_ptr<const Tokenizer>> LoadTokenizerJson(std::string_view, std::string_view,
                                                           const std::string&, std::string_view,
                                                           std::string_view) {
    return Error{
        ErrorCode::kNotImplemented,
        "reading tokenizer.json needs the tokenizer library; this build was made without it (configure with "
        "-DRANKGATE_WITH_RUST=ON)",
        "model", false};
}
#endif

}  // namespace rankgate::text
