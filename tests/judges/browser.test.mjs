// SPDX-License-Identifier: Apache-2.0
// A real browser (Debian's chromium, headless) with the official SDK on a page of another origin: BASE_URL, ROOT, MODEL, PAGE_PORT.
// The server was started with --allowed-origins http://127.0.0.1:$PAGE_PORT. Fails on any console error that a test does not expect and on any
// request that leaves the machine.
import assert from 'node:assert';
import fs from 'node:fs';
import http from 'node:http';
import path from 'node:path';
import test from 'node:test';

import { chromium } from 'playwright-core';

const { BASE_URL: baseURL, ROOT: root, MODEL: model, PAGE_PORT: pagePort } = process.env;
const modules = path.resolve('node_modules');

// The page and the SDK's own files, unbundled: a browser takes them as modules.
const html = `<!doctype html><link rel="icon" href="data:,"><script type="module">
import OpenAI from '/openai/index.mjs';
window.OpenAI = OpenAI;
window.client = (more = {}) => new OpenAI({ baseURL: ${JSON.stringify(baseURL)}, apiKey: 'none', dangerouslyAllowBrowser: true, maxRetries: 0, ...more });
window.ready = true;
</script>`;

function serve(port) {
    const server = http.createServer((request, response) => {
        const file = path.join(modules, path.normalize(decodeURIComponent(request.url.split('?')[0])));
        if (request.url === '/') {
            response.writeHead(200, { 'Content-Type': 'text/html' }).end(html);
        } else if (file.startsWith(modules) && fs.existsSync(file)) {
            response.writeHead(200, { 'Content-Type': 'text/javascript' }).end(fs.readFileSync(file));
        } else {
            response.writeHead(404).end();
        }
    });
    return new Promise((resolve) => server.listen(port, '127.0.0.1', () => resolve(server)));
}

async function metric(name) {
    const text = await (await fetch(`${root}/metrics`)).text();
    return text.split('\n').filter((line) => line.startsWith(`${name}{`) || line.startsWith(`${name} `))
        .reduce((sum, line) => sum + Number(line.slice(line.lastIndexOf(' ') + 1)), 0);
}

let browser;
let allowed;
let foreign;
test.before(async () => {
    allowed = await serve(Number(pagePort));
    foreign = await serve(0);
    browser = await chromium.launch({
        executablePath: process.env.CHROMIUM ?? '/usr/bin/chromium',
        args: ['--no-sandbox', '--disable-gpu', '--disable-background-networking', '--disable-component-update', '--no-first-run'],
    });
});
test.after(async () => {
    await browser?.close();
    allowed?.close();
    foreign?.close();
});

async function open(port, body) {
    const page = await browser.newPage();
    const wrong = [];
    page.on('console', (message) => message.type() === 'error' && wrong.push(message.text()));
    page.on('pageerror', (error) => wrong.push(String(error)));
    page.on('request', (request) => {
        const { hostname, protocol } = new URL(request.url());
        if (protocol !== 'data:' && hostname !== '127.0.0.1') wrong.push(`a request left the machine: ${request.url()}`);
    });
    await page.goto(`http://127.0.0.1:${port}/`);
    await page.waitForFunction('window.ready === true', null, { timeout: 20_000 });
    try {
        return await body(page, wrong);
    } finally {
        await page.close();
    }
}

test('browser: chat from a page of an allowed origin', () => open(pagePort, async (page, wrong) => {
    const reply = await page.evaluate(async (model) => {
        const { data, response } = await client().chat.completions.create(
            { model, temperature: 0, max_tokens: 8, messages: [{ role: 'user', content: 'Hi' }] }).withResponse();
        return { content: data.choices[0].message.content, usage: data.usage, id: response.headers.get('x-request-id') };
    }, model);
    assert.ok(reply.content.length > 0);
    assert.equal(reply.usage.completion_tokens, 8);
    assert.ok(reply.id, 'a page may read x-request-id');
    assert.deepEqual(wrong, []);
}));

test('browser: a stream arrives piece by piece and equals the whole', () => open(pagePort, async (page, wrong) => {
    const got = await page.evaluate(async (model) => {
        const ask = { model, temperature: 0, max_tokens: 24, messages: [{ role: 'user', content: 'Tell me about the sea.' }] };
        const whole = await client().chat.completions.create(ask);
        let text = '';
        const at = [];
        for await (const chunk of await client().chat.completions.create({ ...ask, stream: true })) {
            text += chunk.choices[0]?.delta?.content ?? '';
            at.push(performance.now());
        }
        return { text, whole: whole.choices[0].message.content, spread: at.at(-1) - at[0], chunks: at.length };
    }, model);
    assert.equal(got.text, got.whole);
    assert.ok(got.chunks >= 10 && got.spread > 20, JSON.stringify(got));
    assert.deepEqual(wrong, []);
}));

test('browser: errors of the server are readable across origins', () => open(pagePort, async (page, wrong) => {
    const errors = await page.evaluate(async (model) => {
        const seen = [];
        for (const ask of [{ model: 'none', messages: [{ role: 'user', content: 'x' }] }, { model, messages: [] }]) {
            try {
                await client().chat.completions.create(ask);
                seen.push('no error');
            } catch (error) {
                seen.push([error.status, error.code, error.param, error instanceof OpenAI.APIError]);
            }
        }
        return seen;
    }, model);
    assert.deepEqual(errors, [[404, 'model_not_found', 'model', true], [400, null, 'messages', true]]);
    // The browser itself logs every 4xx.
    assert.deepEqual(wrong.filter((line) => !/Failed to load resource: the server responded with a status of 40[04]/.test(line)), []);
}));

test('browser: an aborted stream and a closed page free their slots within a second', () => open(pagePort, async (page) => {
    const start = (page) => page.evaluate(async (model) => {
        const stream = await client().chat.completions.create(
            { model, max_tokens: 900, ignore_eos: true, stream: true, messages: [{ role: 'user', content: 'Hi' }] });
        for await (const _ of stream) { /* reads on until the page goes */ }
    }, model).catch(() => {});
    const free = async () => {
        const deadline = Date.now() + 1000;
        while ((await metric('rankgate_in_flight')) !== 0) {
            assert.ok(Date.now() < deadline, 'the slot was not freed');
            await new Promise((resolve) => setTimeout(resolve, 20));
        }
    };
    await page.evaluate(async (model) => {
        const stream = await client().chat.completions.create(
            { model, max_tokens: 900, ignore_eos: true, stream: true, messages: [{ role: 'user', content: 'Hi' }] });
        for await (const _ of stream) { stream.controller.abort(); break; }
    }, model);
    await free();
    const second = await browser.newPage();
    await second.goto(`http://127.0.0.1:${pagePort}/`);
    await second.waitForFunction('window.ready === true');
    const running = start(second);
    while ((await metric('rankgate_in_flight')) === 0) await new Promise((resolve) => setTimeout(resolve, 20));
    await second.close();
    await running;
    await free();
}));

test('browser: a page of another origin gets nothing', () => open(foreign.address().port, async (page, wrong) => {
    const outcome = await page.evaluate(async (model) => {
        try {
            await client().chat.completions.create({ model, max_tokens: 1, messages: [{ role: 'user', content: 'x' }] });
            return 'answered';
        } catch (error) {
            return error.constructor.name;
        }
    }, model);
    assert.match(outcome, /Connection/);
    assert.ok(wrong.some((line) => /CORS/.test(line)), wrong.join('\n'));
}));
