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

async function metric(name, label = '') {
    const text = await (await fetch(`${root}/metrics`)).text();
    return text.split('\n').filter((line) => (line.startsWith(`${name}{`) || line.startsWith(`${name} `)) && line.includes(label))
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

async function freed(aborts) {
    const deadline = Date.now() + 1000;
    while ((await metric('rankgate_in_flight')) !== 0 || (await metric('rankgate_streams_open')) !== 0) {
        assert.ok(Date.now() < deadline, 'the slot was not freed');
        await new Promise((resolve) => setTimeout(resolve, 20));
    }
    assert.equal(await metric('rankgate_aborts_total', 'cause="client_gone"'), aborts);
}

test('an aborted stream frees its slot within a second and aborts on the engine', async () => {
    const before = await metric('rankgate_aborts_total', 'cause="client_gone"');
    const ask = { model, messages, max_tokens: 1000, temperature: 1, stream: true, ignore_eos: true };
    const stream = await client.chat.completions.create(ask);
    for await (const _ of stream) {
        stream.controller.abort();
        break;
    }
    await freed(before + 1);
    // Leaving the loop is enough, and so is a signal of one's own on an answer that is not streamed.
    for await (const _ of await client.chat.completions.create(ask)) break;
    await freed(before + 2);
    const own = new AbortController();
    const whole = client.chat.completions.create({ ...ask, stream: false }, { signal: own.signal });
    while ((await metric('rankgate_in_flight')) === 0) await new Promise((resolve) => setTimeout(resolve, 20));
    own.abort();
    await assert.rejects(whole, OpenAI.APIUserAbortError);
    await freed(before + 3);
});

test('a timeout is a timeout', async () => {
    const before = await metric('rankgate_aborts_total', 'cause="client_gone"');
    await assert.rejects(client.chat.completions.create({ model, messages, max_tokens: 1500, ignore_eos: true }, { timeout: 1000 }),
        OpenAI.APIConnectionTimeoutError);
    await freed(before + 1);
});

test('raw responses, request ids and no retries of a mistake', async () => {
    const { data, response, request_id: id } = await client.chat.completions.create(
        { model, messages, max_tokens: 2 }, { headers: { 'X-Request-Id': 'node-7' } }).withResponse();
    assert.equal(id, 'node-7');
    assert.equal(data._request_id, 'node-7');
    assert.match(response.headers.get('content-type'), /^application\/json/);
    const before = await metric('rankgate_http_responses_total', 'status="400"');
    await assert.rejects(client.chat.completions.create({ model, messages, n: 0 }, { maxRetries: 3 }),
        (error) => error instanceof OpenAI.BadRequestError && error.param === 'n' && error.type === 'invalid_request_error' &&
            error.requestID.length > 0);
    assert.equal(await metric('rankgate_http_responses_total', 'status="400"'), before + 1);
});

test('n = 2 streamed: one role, one finish, logprobs and one usage', async () => {
    const roles = [0, 0];
    const finishes = [0, 0];
    const scored = [0, 0];
    let usages = 0;
    const ask = { model, messages, n: 2, temperature: 0.8, seed: 4, max_tokens: 5, ignore_eos: true, logprobs: true, top_logprobs: 1,
        stream: true, stream_options: { include_usage: true } };
    for await (const chunk of await client.chat.completions.create(ask)) {
        if (chunk.choices.length === 0) usages += chunk.usage.completion_tokens === 10 ? 1 : 100;
        for (const choice of chunk.choices) {
            roles[choice.index] += choice.delta.role === 'assistant' ? 1 : 0;
            finishes[choice.index] += choice.finish_reason === 'length' ? 1 : 0;
            scored[choice.index] += choice.logprobs?.content?.length ?? 0;
        }
    }
    assert.deepEqual([roles, finishes, scored, usages], [[1, 1], [1, 1], [5, 5], 1]);
});

test('models', async () => {
    const ids = [];
    for await (const entry of client.models.list()) ids.push(entry.id);
    assert.ok(ids.includes(model));
    assert.equal((await client.models.retrieve(model)).id, model);
});
