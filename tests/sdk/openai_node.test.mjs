// The official OpenAI Node SDK against a running server: BASE_URL, ROOT, MODEL.
import assert from 'node:assert';
import test from 'node:test';

import OpenAI from 'openai';

const { BASE_URL: baseURL, ROOT: root, MODEL: model } = process.env;
const client = new OpenAI({ baseURL, apiKey: 'none', maxRetries: 0, timeout: 60_000 });
const messages = [
    { role: 'system', content: 'You are a helpful assistant.' },
    { role: 'user', content: 'What is the capital of France?' },
];

async function metric(name) {
    const text = await (await fetch(`${root}/metrics`)).text();
    return text.split('\n').filter((line) => line.startsWith(`${name}{`) || line.startsWith(`${name} `))
        .reduce((sum, line) => sum + Number(line.slice(line.lastIndexOf(' ') + 1)), 0);
}

test('chat with usage', async () => {
    const reply = await client.chat.completions.create({ model, messages, temperature: 0, max_tokens: 16 });
    assert.match(reply.choices[0].message.content, /Paris/);
    assert.equal(reply.usage.total_tokens, reply.usage.prompt_tokens + reply.usage.completion_tokens);
});

test('streamed text equals the whole', async () => {
    const ask = { model, temperature: 0, max_tokens: 32, messages: [{ role: 'user', content: 'Say hello é 👍.' }] };
    const whole = await client.chat.completions.create(ask);
    let text = '';
    let usage = null;
    for await (const chunk of await client.chat.completions.create({ ...ask, stream: true, stream_options: { include_usage: true } })) {
        text += chunk.choices[0]?.delta?.content ?? '';
        usage = chunk.usage ?? usage;
    }
    assert.equal(text, whole.choices[0].message.content);
    // cached_tokens may differ: the second request finds the first one's prefix.
    const totals = (u) => [u.prompt_tokens, u.completion_tokens, u.total_tokens];
    assert.deepEqual(totals(usage), totals(whole.usage));
});

test('the stream helper sees role, text and usage', async () => {
    const stream = client.chat.completions.stream({ model, messages, temperature: 0, max_tokens: 8, stream_options: { include_usage: true } });
    const final = await stream.finalChatCompletion();
    assert.equal(final.choices[0].message.role, 'assistant');
    assert.ok((await stream.totalUsage()).total_tokens > 0);
});

test('n = 2, stop and logprobs', async () => {
    const two = await client.chat.completions.create({ model, messages, n: 2, temperature: 0.9, seed: 3, max_tokens: 8 });
    assert.deepEqual(two.choices.map((choice) => choice.index), [0, 1]);
    const cut = await client.chat.completions.create({ model, messages, temperature: 0, max_tokens: 16, stop: ['Paris'] });
    assert.equal(cut.choices[0].finish_reason, 'stop');
    assert.ok(!cut.choices[0].message.content.includes('Paris'));
    const scored = await client.chat.completions.create({ model, messages, temperature: 0, max_tokens: 3, logprobs: true, top_logprobs: 2 });
    assert.equal(scored.choices[0].logprobs.content.length, 3);
    assert.equal(scored.choices[0].logprobs.content[0].top_logprobs.length, 2);
});

test('errors', async () => {
    await assert.rejects(client.chat.completions.create({ model: 'no-such-model', messages }), OpenAI.NotFoundError);
    await assert.rejects(client.chat.completions.create({ model, messages: [] }), OpenAI.BadRequestError);
    await assert.rejects(client.chat.completions.create({ model, messages, temperature: 9 }),
        (error) => error instanceof OpenAI.BadRequestError && error.param === 'temperature');
});

test('an aborted stream frees its slot within a second', async () => {
    const stream = await client.chat.completions.create({ model, messages, max_tokens: 1000, temperature: 1, stream: true, ignore_eos: true });
    for await (const _ of stream) {
        stream.controller.abort();
        break;
    }
    const deadline = Date.now() + 1000;
    while ((await metric('rankgate_in_flight')) !== 0 || (await metric('rankgate_streams_open')) !== 0) {
        assert.ok(Date.now() < deadline, 'the slot was not freed');
        await new Promise((resolve) => setTimeout(resolve, 20));
    }
});

test('models', async () => {
    const ids = [];
    for await (const entry of client.models.list()) ids.push(entry.id);
    assert.ok(ids.includes(model));
    assert.equal((await client.models.retrieve(model)).id, model);
});
