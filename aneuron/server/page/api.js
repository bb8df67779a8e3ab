// Calls to the server: the key, faults with what to do about them, events of a stream.

const KEY = "aneuron-api-key";
const BASE = new URL("./", document.baseURI); // wherever the app is mounted

export const apiKey = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY)),
};

const ADVICE = {
  invalid_api_key: "Enter a key of this server under Settings.",
  origin_not_allowed:
    `Give the server an --api-key, or start it with --cors-origin ${location.origin}; ` +
    "on its own machine, http://127.0.0.1 and its port need neither.",
  context_length_exceeded: "Begin a new chat, or ask for fewer tokens under Settings.",
  model_not_found: "Load this page again: the server has another model now.",
  overloaded: "Too many requests wait. Send it again in a moment.",
  device_error: "Send it again; if it fails again, the server's log says why.",
  engine_unavailable: "The engine is stopping, or has failed: see the server's log, and /health.",
  unreachable: "Check that the server is running, then send it again.",
  cut: "What came is kept. Send the next message to go on, or look into the server's log.",
};

export class Fault extends Error {
  constructor(message, code, status) {
    super(message);
    this.code = code;
    this.advice = ADVICE[code] ?? (status >= 500 ? "The server's log says more." : "");
  }
}

export function headers(more = {}) {
  const key = apiKey.get();
  return key ? { ...more, authorization: `Bearer ${key}` } : more;
}

export const address = (path) => new URL(path, BASE).href;

/** Ask for a path; with a body, post it. Gives the response, or throws a Fault. */
export async function ask(path, { body, signal } = {}) {
  const options = { headers: headers(body && { "content-type": "application/json" }), signal };
  if (body) Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  let response;
  try {
    response = await fetch(address(path), options);
  } catch (error) {
    throw error.name === "AbortError" ? error : new Fault("There is no answer.", "unreachable");
  }
  if (!response.ok) throw await told(response);
  return response;
}

async function told(response) {
  const { error } = await response.json().catch(() => ({})); // a proxy's answer may be anything
  const message = error?.message ?? `The server answered ${response.status}.`;
  return new Fault(message, error?.code, response.status);
}

/** Yield the JSON of each event of a body until `[DONE]`; throws a Fault for an error in it. */
export async function* events(body) {
  for await (const data of lines(body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new Fault(event.error.message, event.error.code, 500);
    yield event;
  }
  throw new Fault("The connection ended before the answer did.", "cut");
}

/** Yield the data of each event. Pieces of a body may end anywhere, also within a letter. */
async function* lines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (let piece; !(piece = await read(reader)).done; ) {
      const whole = (rest + piece.value).split(/\r\n|\n|\r(?!$)/);
      rest = whole.pop();
      yield* whole.filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    throw error.name === "AbortError" ? error : new Fault("The connection broke.", "cut");
  }
}
