// Calls the service that has served this page. Keeps the key in memory and for this tab only.

const STORED = "tandem-key";
let key = sessionStorage.getItem(STORED) || "";

export class ServiceError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const hasKey = () => key !== "";

export function setKey(value) {
  key = value;
  if (value) sessionStorage.setItem(STORED, value);
  else sessionStorage.removeItem(STORED);
}

async function call(path, options = {}) {
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  let answer;
  try {
    answer = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    const isTimeout = error.name === "TimeoutError";
    throw new ServiceError(
      0,
      isTimeout ? "The router did not answer in time." : "The router cannot be reached.",
    );
  }
  if (!answer.ok) throw new ServiceError(answer.status, await reason(answer));
  return answer;
}

async function reason(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `The router answered with status ${answer.status}.`;
  }
}

export async function poll(cursor) {
  const path = cursor ? `console/data?cursor=${encodeURIComponent(cursor)}` : "console/data";
  return (await call(path, { signal: AbortSignal.timeout(8000) })).json();
}

// Returns the arithmetic of a prompt and its output: shapes, work and KV cache.
export async function arithmetic(promptTokens, outputTokens) {
  const path = `console/explain?prompt_tokens=${promptTokens}&output_tokens=${outputTokens}`;
  return (await call(path)).json();
}

// Sends a request that is answered at once.
export async function post(path, body, signal) {
  const options = { method: "POST", headers: { "Content-Type": "application/json" }, signal };
  return (await call(path, { ...options, body: JSON.stringify(body) })).json();
}

// Streams a chat. Calls `onChunk` with each chunk of the answer. Raises ServiceError.
export const chat = (...rest) => stream("v1/chat/completions", ...rest);

// Streams the completion of a text.
export const complete = (...rest) => stream("v1/completions", ...rest);

async function stream(path, body, requestId, signal, onChunk) {
  const answer = await call(path, {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-Request-ID": requestId },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    waiting += value;
    const events = waiting.split("\n\n");
    waiting = events.pop();
    for (const event of events) {
      const data = event
        .split("\n")
        .filter((line) => line.startsWith("data: "))
        .map((line) => line.slice(6))
        .join("\n");
      if (!data || data === "[DONE]") continue;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServiceError(200, chunk.error.message);
      onChunk(chunk);
    }
  }
}
