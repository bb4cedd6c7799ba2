// SPDX-License-Identifier: Apache-2.0
// The reference of tests/e2e/test_greedy.py: llama.cpp alone, one sequence, the whole prompt at once, arg
// max. It uses nothing of rankgate. Usage: plain_loop MODEL COUNT [CHUNK] < ids, one prompt a line: token
// ids, or "text:" and the text with \n as \\n. Prints for each prompt one line: prompt ids | COUNT generated
// ids | their bytes in hexadecimal. CHUNK feeds a prompt in pieces.
#include <llama.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

namespace {

constexpr int kContext = 2048;

std::vector<llama_token> Tokens(const llama_vocab* vocab, const std::string& line) {
    std::vector<llama_token> ids;
    if (line.rfind("text:", 0) != 0) {
        std::istringstream stream{line};
        for (llama_token id = 0; stream >> id;) {
            ids.push_back(id);
        }
        return ids;
    }
    std::string text;
    for (std::size_t i = 5; i < line.size(); ++i) {
        if (line[i] == '\\' && i + 1 < line.size() && line[i + 1] == 'n') {
            text += '\n';
            ++i;
        } else {
            text += line[i];
        }
    }
    ids.resize(text.size() + 8);
    const int count = llama_tokenize(vocab, text.data(), static_cast<std::int32_t>(text.size()), ids.data(),
                                     static_cast<std::int32_t>(ids.size()), true, true);
    ids.resize(static_cast<std::size_t>(std::max(count, 0)));
    return ids;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 3) {
        std::fprintf(stderr, "usage: plain_loop MODEL COUNT [CHUNK] < prompts\n");
        return 2;
    }
    const int count = std::atoi(argv[2]);
    const std::size_t chunk = argc > 3 ? static_cast<std::size_t>(std::atoi(argv[3])) : kContext;
    llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
    llama_model* model = llama_model_load_from_file(argv[1], llama_model_default_params());
    llama_context_params params = llama_context_default_params();
    params.n_ctx = kContext;
    params.n_batch = kContext;
    params.n_ubatch = kContext;
    params.n_seq_max = 1;
    params.n_threads = 1;
    params.n_threads_batch = 1;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    llama_context* context = model == nullptr ? nullptr : llama_init_from_model(model, params);
    if (context == nullptr) {
        std::fprintf(stderr, "plain_loop: %s cannot be loaded\n", argv[1]);
        return 1;
    }
    const llama_vocab* vocab = llama_model_get_vocab(model);
    const auto size = static_cast<std::size_t>(llama_vocab_n_tokens(vocab));
    for (std::string line; std::getline(std::cin, line);) {
        std::vector<llama_token> next = Tokens(vocab, line);
        for (const llama_token id : next) {
            std::printf("%d ", id);
        }
        std::printf("|");
        llama_memory_clear(llama_get_memory(context), true);
        std::string bytes;
        for (int i = 0; i < count; ++i) {
            for (std::size_t at = 0; at < next.size(); at += chunk) {
                const std::size_t piece = std::min(chunk, next.size() - at);
                if (llama_decode(context, llama_batch_get_one(next.data() + at,
                                                              static_cast<std::int32_t>(piece))) != 0) {
                    std::fprintf(stderr, "plain_loop: decode failed\n");
                    return 1;
                }
            }
            const float* logits = llama_get_logits_ith(context, -1);
            const auto token = static_cast<llama_token>(std::max_element(logits, logits + size) - logits);
            std::printf(" %d", token);
            char piece[256];
            const int length = llama_token_to_piece(vocab, token, piece, sizeof piece, 0, false);
            bytes.append(piece, static_cast<std::size_t>(std::max(length, 0)));
            next = {token};
        }
        std::printf(" | ");
        for (const char c : bytes) {
            std::printf("%02x", static_cast<unsigned char>(c));
        }
        std::printf("\n");
    }
    llama_free(context);
    llama_model_free(model);
    return 0;
}
