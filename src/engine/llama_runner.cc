// SPDX-License-Identifier: Apache-2.0
#include "engine/llama_runner.h"

#include <llama.h>

#include <algorithm>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/log.h"
#include "engine/grammar.h"
#include "engine/sampler.h"

namespace rankgate::engine {

namespace {

/// Any JSON object. White space is bounded, or a small model pads for ever.
constexpr const char* kJsonObjectGrammar = R"(root ::= object
value ::= object | array | string | number | "true" | "false" | "null"
object ::= "{" ws ( pair ( "," ws pair )* )? "}" ws
pair ::= string ":" ws value
array ::= "[" ws ( value ( "," ws value )* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" ( ["\\bfnrt/] | "u" [0-9a-fA-F]{4} ) )* "\"" ws
number ::= "-"? ( "0" | [1-9] [0-9]{0,15} ) ( "." [0-9]{1,16} )? ( [eE] [-+]? [0-9]{1,3} )? ws
ws ::= [ \t\n]{0,4}
)";

struct ModelFree {
    void operator()(llama_model* model) const noexcept { llama_model_free(model); }
};
struct ContextFree {
    void operator()(llama_context* context) const noexcept { llama_free(context); }
};
void ForwardLog(ggml_log_level level, const char* text, void* /*user*/) {
    if (level == GGML_LOG_LEVEL_ERROR) {
        std::string_view line{text};
        while (!line.empty() && line.back() == '\n') {
            line.remove_suffix(1);
        }
        LogError("llama_cpp", {{"text", line}});
    }
}

/// One KV stream: what it holds, whether a sequence uses it, and that sequence's grammar.
struct Slot {
    std::vector<TokenId> held;  // tokens whose KV is in the stream, in order
    std::optional<std::string> salt;
    std::uint64_t used{0};
    bool stale{false};  // the prefix cache was reset since
    std::unique_ptr<GrammarState> grammar;
};

class LlamaRunner final : public ModelRunner {
  public:
    static Result<std::unique_ptr<ModelRunner>> Make(const LlamaConfig& config);
    ~LlamaRunner() override { llama_batch_free(batch_); }

    const ModelFacts& facts() const noexcept override { return facts_; }
    Status Check(const wire::GenerateRequest& request) noexcept override;
    Placement Place(const Sequence& sequence, std::span<const std::int32_t> free_slots) noexcept override;
    Status Run(const StepPlan& plan, StepResult& result) noexcept override;
    void ResetPrefixCache() noexcept override;

  private:
    LlamaRunner() = default;
    static Result<std::shared_ptr<const Grammar>> ParseGrammar(const wire::StructuredOutputs& structured);
    /// Made on the first grammar: sorting a vocabulary takes some 20 ms.
    const TokenTable& Tokens();
    Status Prepare(const PlanItem& item);
    void AppendBatch(const PlanItem& item, std::int32_t& outputs);
    ItemResult Collect(const PlanItem& item, std::int32_t& output);
    ItemResult SampleWithGrammar(const Sequence& sequence, GrammarState& grammar,
                                 std::span<const float> logits);
    bool WantsPromptLogprobs(const Sequence& sequence) const noexcept {
        return sequence.request.sampling.prompt_logprobs.has_value() && !sequence.prompt_logprobs_done;
    }

    ModelFacts facts_;
    std::unique_ptr<llama_model, ModelFree> model_;
    std::unique_ptr<llama_context, ContextFree> context_;
    const llama_vocab* vocab_{nullptr};
    llama_memory_t memory_{nullptr};
    llama_batch batch_{};
    std::vector<Slot> slots_;
    std::uint64_t use_{0};
    bool reuse_{true};
    std::vector<std::int32_t> outputs_;  // batch positions with logits, in order
    SamplerScratch scratch_;
    std::vector<std::uint8_t> allowed_;
    std::unique_ptr<TokenTable> tokens_;
};

Result<std::unique_ptr<ModelRunner>> LlamaRunner::Make(const LlamaConfig& config) {
    llama_log_set(ForwardLog, nullptr);
    llama_backend_init();
    std::unique_ptr<LlamaRunner> runner{new LlamaRunner};
    llama_model_params model_params = llama_model_default_params();
    runner->model_.reset(llama_model_load_from_file(config.path.c_str(), model_params));
    if (runner->model_ == nullptr) {
        return Error{ErrorCode::kUnavailable, "llama.cpp cannot load " + config.path, {}, false};
    }
    llama_model* model = runner->model_.get();
    if (llama_model_has_encoder(model)) {
        return Error{ErrorCode::kUnavailable,
                     config.path + " has an encoder: only decoder models are served",
                     {},
                     false};
    }
    const std::int64_t trained = llama_model_n_ctx_train(model);
    std::int64_t length =
        config.max_model_len > 0 ? config.max_model_len : std::min(trained, kDefaultLlamaContext);
    if (length > trained) {
        return Error::Invalid("--max-model-len", "--max-model-len " + std::to_string(length) +
                                                     " is not allowed: the model was trained for " +
                                                     std::to_string(trained));
    }
    llama_context_params params = llama_context_default_params();
    params.n_seq_max = static_cast<std::uint32_t>(config.max_num_seqs);
    // llama.cpp pads each stream; ask for whole pads, or the last stream would be short.
    const std::int64_t padded = (length + 255) / 256 * 256;
    params.n_ctx = static_cast<std::uint32_t>(padded * config.max_num_seqs);
    params.n_batch = static_cast<std::uint32_t>(config.max_num_batched_tokens);
    params.n_ubatch = params.n_batch;
    params.n_threads = config.threads;
    params.n_threads_batch = config.threads;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    params.kv_unified = false;
    params.no_perf = true;
    runner->context_.reset(llama_init_from_model(model, params));
    if (runner->context_ == nullptr) {
        return Error{
            ErrorCode::kUnavailable,
            "llama.cpp cannot make a context of " + std::to_string(params.n_ctx) + " tokens (memory?)",
            {},
            false};
    }
    runner->vocab_ = llama_model_get_vocab(model);
    runner->memory_ = llama_get_memory(runner->context_.get());
    if (runner->memory_ == nullptr) {
        return Error{
            ErrorCode::kUnavailable, config.path + " has no sequence memory: it cannot be served", {}, false};
    }
    length = std::min<std::int64_t>(length, llama_n_ctx_seq(runner->context_.get()));
    runner->batch_ = llama_batch_init(config.max_num_batched_tokens, 0, 1);
    runner->slots_.resize(static_cast<std::size_t>(config.max_num_seqs));
    // Recurrent states and sliding windows cannot be cut back to a prefix.
    runner->reuse_ = config.prefix_caching && !llama_model_is_recurrent(model) &&
                     !llama_model_is_hybrid(model) && llama_model_n_swa(model) == 0;
    ModelFacts& facts = runner->facts_;
    const std::size_t slash = config.path.rfind('/');
    facts.model_name = slash == std::string::npos ? config.path : config.path.substr(slash + 1);
    facts.dtype = "float16";
    facts.max_model_len = length;
    facts.vocab_size = llama_vocab_n_tokens(runner->vocab_);
    if (const TokenId eos = llama_vocab_eos(runner->vocab_); eos >= 0) {
        facts.eos_token_ids.push_back(eos);
    }
    for (TokenId token = 0; token < facts.vocab_size; ++token) {
        if (llama_vocab_is_eog(runner->vocab_, token) &&
            std::find(facts.eos_token_ids.begin(), facts.eos_token_ids.end(), token) ==
                facts.eos_token_ids.end()) {
            facts.eos_token_ids.push_back(token);
        }
    }
    char description[128] = "";
    llama_model_desc(model, description, sizeof description);
    LogInfo("llama_loaded", {{"model", config.path},
                             {"kind", description},
                             {"vocabulary", facts.vocab_size},
                             {"context_per_sequence", length},
                             {"n_seq_max", params.n_seq_max},
                             {"n_batch", params.n_batch},
                             {"threads", config.threads},
                             {"flash_attention", false},
                             {"kv_unified", false},
                             {"prefix_reuse", runner->reuse_}});
    return std::unique_ptr<ModelRunner>{std::move(runner)};
}

Result<std::shared_ptr<const Grammar>> LlamaRunner::ParseGrammar(const wire::StructuredOutputs& structured) {
    using Kind = wire::StructuredOutputs::Kind;
    switch (structured.kind) {
        case Kind::kGrammar:
            return Grammar::Parse(structured.value);
        case Kind::kJsonObject:
            return Grammar::Parse(kJsonObjectGrammar);
        default:
            return Error{ErrorCode::kNotImplemented, "runner llama follows grammars and json_object only",
                         "structured_outputs", false};
    }
}

const TokenTable& LlamaRunner::Tokens() {
    if (tokens_ == nullptr) {
        std::vector<std::string> pieces(static_cast<std::size_t>(facts_.vocab_size));
        char buffer[512];
        for (TokenId token = 0; token < facts_.vocab_size; ++token) {
            // Control tokens have no text here, and a grammar never allows them.
            const std::int32_t size = llama_token_to_piece(vocab_, token, buffer, sizeof buffer, 0, false);
            if (size > 0 && !llama_vocab_is_control(vocab_, token) && !llama_vocab_is_eog(vocab_, token)) {
                pieces[static_cast<std::size_t>(token)].assign(buffer, static_cast<std::size_t>(size));
            }
        }
        tokens_ = std::make_unique<TokenTable>(std::move(pieces));
    }
    return *tokens_;
}

Status LlamaRunner::Check(const wire::GenerateRequest& request) noexcept {
    if (request.lora.has_value()) {
        return Error::Invalid("lora_request", "runner llama has no LoRA support");
    }
    if (request.sampling.structured_outputs.has_value()) {
        if (auto grammar = ParseGrammar(*request.sampling.structured_outputs); !grammar.ok()) {
            return grammar.error();
        }
    }
    return Status::Ok();
}

Placement LlamaRunner::Place(const Sequence& sequence, std::span<const std::int32_t> free_slots) noexcept {
    const bool may_reuse =
        reuse_ && !sequence.request.sampling.skip_reading_prefix_cache && !WantsPromptLogprobs(sequence);
    Placement best;
    std::uint64_t oldest = 0;
    for (const std::int32_t index : free_slots) {
        const Slot& slot = slots_[static_cast<std::size_t>(index)];
        std::int64_t common = 0;
        if (may_reuse && !slot.stale && slot.salt == sequence.request.cache_salt) {
            const auto limit = std::min<std::int64_t>(static_cast<std::int64_t>(slot.held.size()),
                                                      sequence.num_tokens() - 1);
            while (common < limit &&
                   slot.held[static_cast<std::size_t>(common)] == sequence.TokenAt(common)) {
                ++common;
            }
        }
        // The longest common beginning; among equals the one used longest ago, so that others keep theirs.
        if (best.slot < 0 || common > best.cached || (common == best.cached && slot.used < oldest)) {
            best = Placement{index, common};
            oldest = slot.used;
        }
    }
    return best;
}

void LlamaRunner::ResetPrefixCache() noexcept {
    // A running sequence goes on in its slot; what it leaves behind is not reused either.
    for (Slot& slot : slots_) {
        slot.stale = true;
    }
}

Status LlamaRunner::Prepare(const PlanItem& item) {
    Slot& slot = slots_[static_cast<std::size_t>(item.slot)];
    slot.used = ++use_;
    if (!item.fresh) {
        return Status::Ok();
    }
    const Sequence& sequence = *item.sequence;
    const auto keep = static_cast<llama_pos>(item.first_position);
    if (!llama_memory_seq_rm(memory_, item.slot, keep, -1)) {
        return Error{
            ErrorCode::kEngineError, "llama.cpp cannot cut a sequence back to its prefix", {}, false};
    }
    slot.held.resize(static_cast<std::size_t>(item.first_position));
    slot.salt = sequence.request.cache_salt;
    slot.stale = false;
    slot.grammar.reset();
    if (sequence.request.sampling.structured_outputs.has_value()) {
        auto grammar = ParseGrammar(*sequence.request.sampling.structured_outputs);
        if (!grammar.ok()) {
            return grammar.error();  // it was fine at the door
        }
        slot.grammar = std::make_unique<GrammarState>(std::move(*grammar));
        for (const TokenId token : sequence.output) {
            // After a preemption. These tokens were allowed before; should that ever fail, the next mask is
            // an error.
            (void)slot.grammar->Accept(Tokens().piece(token)).ok();
        }
    }
    return Status::Ok();
}

void LlamaRunner::AppendBatch(const PlanItem& item, std::int32_t& outputs) {
    const Sequence& sequence = *item.sequence;
    Slot& slot = slots_[static_cast<std::size_t>(item.slot)];
    RG_CHECK(static_cast<std::int64_t>(slot.held.size()) == item.first_position);
    const bool score_prompt = WantsPromptLogprobs(sequence);
    for (std::int64_t i = 0; i < item.num_tokens; ++i) {
        const std::int64_t position = item.first_position + i;
        const std::int32_t at = batch_.n_tokens++;
        const TokenId token = sequence.TokenAt(position);
        batch_.token[at] = token;
        batch_.pos[at] = static_cast<llama_pos>(position);
        batch_.n_seq_id[at] = 1;
        batch_.seq_id[at][0] = item.slot;
        const bool wanted = (item.sample && i + 1 == item.num_tokens) ||
                            (score_prompt && position + 1 < sequence.prompt_len());
        batch_.logits[at] = wanted ? 1 : 0;
        outputs += wanted ? 1 : 0;
        slot.held.push_back(token);
    }
}

ItemResult LlamaRunner::SampleWithGrammar(const Sequence& sequence, GrammarState& grammar,
                                          std::span<const float> logits) {
    ItemResult result;
    // The whole mask at once keeps the distribution exact (drawing first and asking the grammar then would
    // not).
    if (!grammar.Mask(Tokens(), allowed_).ok()) {
        result.kind = ItemResult::Kind::kFailed;
        return result;
    }
    const bool complete = grammar.complete();
    for (const TokenId token : facts_.eos_token_ids) {
        allowed_[static_cast<std::size_t>(token)] = complete ? 1 : 0;
    }
    result.kind = ItemResult::Kind::kToken;
    result.token = SampleToken(sequence, logits, allowed_, scratch_);
    // Masks and grammar may leave nothing over (a bad word that the grammar demands, say).
    const bool allowed = allowed_[static_cast<std::size_t>(result.token)] != 0;
    if (allowed && llama_vocab_is_eog(vocab_, result.token)) {
        result.finish =
            wire::FinishReason::kStop;  // the grammar is complete, whatever the request calls its EOS
    } else if (!allowed || !grammar.Accept(Tokens().piece(result.token)).ok()) {
        result.kind = ItemResult::Kind::kFailed;
    }
    return result;
}

ItemResult LlamaRunner::Collect(const PlanItem& item, std::int32_t& output) {
    Sequence& sequence = *item.sequence;
    Slot& slot = slots_[static_cast<std::size_t>(item.slot)];
    const auto vocabulary = static_cast<std::size_t>(facts_.vocab_size);
    ItemResult result;
    if (WantsPromptLogprobs(sequence)) {
        const std::int32_t top = *sequence.request.sampling.prompt_logprobs;
        sequence.prompt_logprobs.width = 1 + (top < 0 ? facts_.vocab_size : top);
        const std::int64_t end = std::min(item.first_position + item.num_tokens, sequence.prompt_len() - 1);
        for (std::int64_t position = item.first_position; position < end; ++position, ++output) {
            // The last prompt position is only scored as a sample; earlier ones give the logprob of their
            // successor.
            const std::span<const float> logits{
                llama_get_logits_ith(context_.get(), outputs_[static_cast<std::size_t>(output)]), vocabulary};
            if (position >= sequence.prompt_logprobs.positions) {
                AppendLogprobs(logits, sequence.TokenAt(position + 1), top, scratch_,
                               sequence.prompt_logprobs);
            }
        }
        sequence.prompt_logprobs_done = sequence.prompt_logprobs.positions == sequence.prompt_len() - 1;
    }
    if (!item.sample) {
        return result;
    }
    const std::span<const float> logits{
        llama_get_logits_ith(context_.get(), outputs_[static_cast<std::size_t>(output++)]), vocabulary};
    if (slot.grammar != nullptr) {
        result = SampleWithGrammar(sequence, *slot.grammar, logits);
        if (result.kind == ItemResult::Kind::kFailed) {
            return result;
        }
    } else {
        result.kind = ItemResult::Kind::kToken;
        result.token = SampleToken(sequence, logits, {}, scratch_);
    }
    if (sequence.want_logprobs) {
        AppendLogprobs(logits, result.token, sequence.request.sampling.logprobs.value_or(0), scratch_,
                       sequence.logprobs);
    }
    return result;
}

Status LlamaRunner::Run(const StepPlan& plan, StepResult& result) noexcept {
    batch_.n_tokens = 0;
    std::int32_t wanted = 0;
    for (const PlanItem& item : plan.items) {
        if (Status prepared = Prepare(item); !prepared.ok()) {
            return prepared;
        }
        AppendBatch(item, wanted);
    }
    outputs_.clear();
    for (std::int32_t i = 0; i < batch_.n_tokens; ++i) {
        if (batch_.logits[i] != 0) {
            outputs_.push_back(i);
        }
    }
    if (const std::int32_t code = llama_decode(context_.get(), batch_); code != 0) {
        return Error{ErrorCode::kEngineError, "llama_decode failed with " + std::to_string(code), {}, false};
    }
    std::int32_t output = 0;
    for (const PlanItem& item : plan.items) {
        result.items.push_back(Collect(item, output));
    }
    RG_CHECK(output == wanted);
    return Status::Ok();
}

}  // namespace

Result<std::unique_ptr<ModelRunner>> MakeLlamaRunner(const LlamaConfig& config) {
    return LlamaRunner::Make(config);
}

}  // namespace rankgate::engine
