// The chat. What a model says is only ever text here: nothing of it becomes an element.

import { Fault, apiKey, ask, events } from "./api.js";
import "./timeline.js";

const $ = (id) => document.getElementById(id);
const [log, prompt] = [$("log"), $("prompt")];

let messages = []; // of the conversation, without the system prompt
let running = null; // what stops the answer that is coming

// ── a turn ────────────────────────────────────────────────────────────────────────────────

function addTurn(role, name) {
  $("empty").hidden = true;
  const turn = $("turn").content.firstElementChild.cloneNode(true);
  turn.classList.add(role);
  turn.querySelector("h2").textContent = name;
  log.append(turn);
  return turn;
}

/** Keep the end in sight, unless the reader has gone back to something. */
function following(change) {
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 48;
  change();
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

class Answer {
  constructor(model) {
    this.turn = addTurn("assistant", model);
    this.turn.setAttribute("aria-busy", "true"); // read out when it is whole
    this.place = this.turn.querySelector(".text");
    this.thoughts = this.turn.querySelector(".reasoning");
    this.text = this.fresh = this.thought = ""; // all of it; what is not shown so far
    this.usage = this.reason = this.frame = this.firstAt = this.lastAt = null;
    this.askedAt = performance.now();
  }

  take({ choices: [choice], usage }) {
    this.usage = usage ?? this.usage;
    if (!choice) return;
    this.reason = choice.finish_reason ?? this.reason;
    const { content = "", reasoning = "", reasoning_content: thought = reasoning } = choice.delta;
    if (!content && !thought) return;
    this.lastAt = performance.now();
    this.firstAt ??= this.lastAt;
    this.text += content;
    [this.fresh, this.thought] = [this.fresh + content, this.thought + thought];
    this.frame ||= requestAnimationFrame(() => following(() => this.show())); // however fast it comes
  }

  show() {
    this.place.append(this.fresh); // a string is appended as text
    this.thoughts.lastElementChild.append(this.thought);
    if (this.thought) this.thoughts.hidden = false;
    this.fresh = this.thought = "";
    this.frame = null;
  }

  end(fault) {
    cancelAnimationFrame(this.frame);
    this.show();
    this.turn.normalize(); // one text of many
    this.turn.removeAttribute("aria-busy");
    this.turn.querySelector(".facts").textContent = this.facts(fault);
    if (fault) this.turn.append(faultBox(fault));
    log.scrollTop = log.scrollHeight;
  }

  facts(fault) {
    const told = [];
    const { prompt_tokens, completion_tokens } = this.usage ?? {};
    if (this.usage) told.push(`${prompt_tokens} + ${completion_tokens} tokens`);
    const seconds = (this.lastAt - this.firstAt) / 1000;
    if (completion_tokens > 1 && seconds > 0)
      told.push(`${((completion_tokens - 1) / seconds).toFixed(1)} tokens/s`);
    if (this.firstAt) told.push(`first token after ${(this.firstAt - this.askedAt).toFixed(0)} ms`);
    if (this.reason === "length") told.push("cut off at the most tokens allowed");
    if (!this.reason && !fault) told.push("stopped");
    return told.join(" · ");
  }
}

function faultBox({ message, advice }) {
  const box = $("fault").content.firstElementChild.cloneNode(true);
  box.querySelector("strong").textContent = message;
  box.querySelector("span").textContent = advice ?? "";
  return box;
}

// ── asking ────────────────────────────────────────────────────────────────────────────────

function body() {
  const system = $("system").value.trim();
  const asked = {
    model: $("model").value,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    stream: true,
    stream_options: { include_usage: true },
  };
  if ($("temperature").value) asked.temperature = $("temperature").valueAsNumber;
  if ($("max-tokens").value) asked.max_tokens = $("max-tokens").valueAsNumber;
  return asked;
}

async function send() {
  const content = prompt.value;
  if (running || !content.trim() || !areSettingsValid()) return;
  addTurn("user", "You").querySelector(".text").textContent = content;
  messages.push({ role: "user", content });
  prompt.value = "";
  const answer = new Answer($("model").value);
  log.scrollTop = log.scrollHeight;
  const asked = messages;
  const fault = await receive(answer);
  if (asked !== messages) return; // a new chat has begun meanwhile
  if (answer.text) {
    messages.push({ role: "assistant", content: answer.text });
  } else {
    messages.pop(); // it is no part of the conversation, and can be sent again
    prompt.value ||= content;
  }
}

/** A field that is wrong can only be shown where it can be seen. */
function areSettingsValid() {
  if ($("composer").checkValidity()) return true;
  $("settings").open = true;
  $("composer").reportValidity();
  return false;
}

/** Let an answer come until it ends, is stopped, or fails; gives what went wrong. */
async function receive(answer) {
  const own = (running = new AbortController());
  const { signal } = own;
  let fault = null;
  showRunning("The answer is coming.");
  try {
    const response = await ask("v1/chat/completions", { body: body(), signal });
    for await (const chunk of events(response.body)) answer.take(chunk);
  } catch (error) {
    if (!signal.aborted) fault = error instanceof Fault ? error : new Fault(String(error));
  }
  answer.end(fault);
  if (running === own) running = null;
  showRunning(fault ? "The answer failed." : signal.aborted ? "Stopped." : "");
  if (fault?.code === "invalid_api_key") askKey();
  return fault;
}

function showRunning(status) {
  $("status").textContent = status;
  $("stop").hidden = !running;
  $("send").hidden = Boolean(running);
  if (!running) prompt.focus();
}

function newChat() {
  running?.abort();
  messages = [];
  for (const turn of log.querySelectorAll(".turn, .fault")) turn.remove();
  $("empty").hidden = false;
  prompt.focus();
}

// ── the model and the key ─────────────────────────────────────────────────────────────────

async function loadModels() {
  for (const box of log.querySelectorAll(":scope > .fault")) box.remove();
  try {
    const { data } = await (await ask("v1/models")).json();
    $("model").replaceChildren(...data.map(({ id }) => new Option(id, id)));
  } catch (fault) {
    log.append(faultBox(fault));
    if (fault.code === "invalid_api_key") askKey();
  }
}

function askKey() {
  $("settings").open = true;
  $("key").focus();
}

$("key").value = apiKey.get();
$("key").addEventListener("change", () => {
  apiKey.set($("key").value.trim());
  loadModels();
});
$("key").addEventListener("keydown", (event) => {
  if (event.key !== "Enter") return;
  event.preventDefault(); // it would send the message
  $("key").blur(); // which is a change
  prompt.focus();
});
$("new").addEventListener("click", newChat);
$("stop").addEventListener("click", () => running?.abort());
$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => event.key === "Escape" && running?.abort());
loadModels();
