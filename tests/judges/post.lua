-- SPDX-License-Identifier: Apache-2.0
-- wrk: a short chat completion per request. Counts every answer that is not 2xx, which wrk's own summary does not fail on.
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.body = '{"model":"' .. os.getenv("MODEL") ..
    '","max_tokens":2,"temperature":0,"messages":[{"role":"user","content":"Hi"}]}'
function done(summary, latency, requests)
    local errors = summary.errors
    io.write(string.format("wrk-judged: requests=%d status=%d connect=%d read=%d write=%d timeout=%d p99_ms=%.1f\n",
        summary.requests, errors.status, errors.connect, errors.read, errors.write, errors.timeout,
        latency:percentile(99) / 1000))
end
