// Puts the server's events into the page, which is readable without it. live.chat.js talks with the model.
"use strict";
const find = (id) => document.getElementById(id);
let key = sessionStorage.getItem("key") || "";
const headers = () => (key ? { Authorization: `Bearer ${key}` } : {});
const post = (path, body, signal) => fetch(path, {
  method: "POST", body: JSON.stringify(body), signal, headers: { ...headers(), "Content-Type": "application/json" },
});

// The data of each server-sent event of an answer, with the event's name.
async function* eventsOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const whole = (rest + value).split(/\r?\n\r?\n/);
    rest = whole.pop();
    for (const block of whole) {
      const lines = block.split(/\r?\n/);
      const data = lines.filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim());
      if (data.length) yield data.join("\n");
    }
  }
}

// What happens on the server: only while the page is seen.
let looking = null;
const wait = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

async function look() {
  for (let pause = 1000; looking; pause = Math.min(10000, 2 * pause)) {
    try {
      const answer = await fetch("events", { headers: headers(), signal: looking.signal });
      if (answer.status === 401) return askForKey();
      if (answer.ok) {
        find("key-form").hidden = true;
        find("link").textContent = "";
        pause = 1000;
        for await (const data of eventsOf(answer)) show(JSON.parse(data));
      }
    } catch (error) {
      if (error.name === "AbortError") return;
    }
    find("link").textContent = "The server does not answer; this is what it did last.";
    await wait(pause);
  }
}

function show(parts) {
  for (const [id, html] of Object.entries(parts)) find(id).innerHTML = html; // the server escapes what it writes
}

function follow() {
  if (looking) looking.abort();
  looking = document.hidden ? null : new AbortController();
  if (looking) look();
}

function askForKey() {
  find("state").textContent = key ? "The key is wrong." : "This server wants a key.";
  find("key-form").hidden = false;
  find("key").focus();
}

find("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = find("key").value.trim();
  sessionStorage.setItem("key", key);
  find("state").textContent = "";
  follow();
});
document.addEventListener("visibilitychange", follow);
follow();
