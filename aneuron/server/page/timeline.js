// The panel with the timeline. It asks once a second, while it is open and can be seen.

import { Fault, address, ask, headers } from "./api.js";

const STEPS = 24;
const EVERY_MS = 1000;
const $ = (id) => document.getElementById(id);
const panel = $("timeline");

let [timer, isAsking] = [0, false];
let last = null; // tokens so far, and when

const isSeen = () => panel.open && !document.hidden;

async function look() {
  clearTimeout(timer);
  if (isAsking || !isSeen()) return;
  isAsking = true;
  try {
    showNumbers(await (await ask(`timeline.json?steps=${STEPS}`)).json());
    if (isSeen()) showPicture(await askPicture());
    showFault(null);
  } catch (fault) {
    showFault(fault);
  } finally {
    isAsking = false;
  }
  if (isSeen()) timer = setTimeout(look, EVERY_MS);
}

/** The picture as elements: an XML document, as text that becomes HTML is forbidden here. */
function askPicture() {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("GET", address(`timeline.svg?steps=${STEPS}`));
    for (const [name, value] of Object.entries(headers())) request.setRequestHeader(name, value);
    request.responseType = "document";
    request.onerror = () => reject(new Fault("There is no answer.", "unreachable"));
    request.onload = () => {
      const svg = request.status === 200 ? request.responseXML?.documentElement : null;
      if (svg?.localName === "svg") resolve(document.importNode(svg, true));
      else reject(new Fault(`The server answered ${request.status}.`, null, request.status));
    };
    request.send();
  });
}

function showPicture(svg) {
  const picture = $("picture");
  // Not while somebody reads a title: it would go with its bar.
  if (matchMedia("(hover: hover)").matches && picture.matches(":hover")) return;
  const isNew = !picture.firstChild;
  picture.replaceChildren(svg);
  if (isNew) picture.scrollLeft = picture.scrollWidth; // where it is narrow: to the last steps
}

const rounded = (number) => number.toFixed(number && number < 10 ? 1 : 0);
const percent = (share) => (share === null ? "–" : `${rounded(100 * share)} %`);

function showNumbers(now) {
  const at = performance.now();
  const tokens = now.generation_tokens;
  const rate = last && tokens >= last.tokens ? ((tokens - last.tokens) / (at - last.at)) * 1000 : null;
  last = { tokens, at };
  const texts = {
    running: now.running,
    waiting: now.waiting,
    rate: rate === null ? "–" : rounded(rate),
    kv: percent(now.num_blocks ? now.used_blocks / now.num_blocks : null),
    async: percent(now.window_decode_async_share),
    idle: now.window_steps ? percent(now.window_idle_share) : "–",
  };
  for (const [id, text] of Object.entries(texts)) $(id).textContent = text;
  showBreaks(now.breaks);
}

function showBreaks(breaks) {
  const texts = Object.entries(breaks).map(
    ([why, { count, seconds }]) => `${why.replaceAll("_", " ")} ${count} (${(1000 * seconds).toFixed(1)} ms)`,
  );
  const items = (texts.length ? texts : ["none"]).map((text) => {
    const item = document.createElement("li");
    item.textContent = text;
    return item;
  });
  $("breaks").replaceChildren(...items);
}

function showFault(fault) {
  const place = $("timeline-fault");
  const text = fault ? `${fault.message} ${fault.advice ?? ""}` : "";
  if (place.textContent !== text) place.textContent = text; // else it is read out each second
  place.hidden = !fault;
}

panel.addEventListener("toggle", () => look((last = null)));
document.addEventListener("visibilitychange", look);
