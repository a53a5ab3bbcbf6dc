// Draws the page again from the server every few seconds, and keeps focus, scroll and what is open.
"use strict";
(() => {
  const away = document.getElementById("away"), paused = document.getElementById("paused");
  let tag = null, since = null, timer = null, isAsking = false;

  const pause = () => Number(document.getElementById("main").dataset.live) * 1000;

  const isTyping = () => {
    const one = document.activeElement;
    return one !== null && /^(INPUT|TEXTAREA|SELECT)$/.test(one.tagName) && one.closest("main, header") !== null;
  };

  const isOpen = () => document.querySelector("main details[open]") !== null;

  const say = (text) => {
    away.textContent = text;
    away.hidden = text === "";
    document.body.classList.toggle("old", text !== "");
  };

  const keep = (fresh) => {
    const focused = document.activeElement, id = focused && focused.id, href = focused && focused.getAttribute("href");
    const places = [...document.querySelectorAll(".scroll, .log")].map((one) => [one.scrollLeft, one.scrollTop, one.scrollTop + one.clientHeight >= one.scrollHeight - 4]);
    for (const name of ["header", "main"]) {
      const now = document.querySelector(name), next = fresh.querySelector(name);
      if (now && next) now.replaceWith(document.adoptNode(next));
    }
    document.title = fresh.title;
    [...document.querySelectorAll(".scroll, .log")].forEach((one, at) => {
      if (!places[at]) return;
      one.scrollLeft = places[at][0];
      one.scrollTop = one.classList.contains("log") && places[at][2] ? one.scrollHeight : places[at][1];
    });
    const again = (id && document.getElementById(id)) || (href && [...document.links].find((one) => one.getAttribute("href") === href));
    if (again) again.focus({ preventScroll: true });
  };

  const look = async () => {
    timer = null;
    if (document.hidden || isAsking) return;
    const why = isTyping() ? "Paused while you type." : isOpen() ? "Paused while a question is open." : "";
    paused.textContent = why;
    paused.hidden = why === "";
    if (why !== "") return plan();
    isAsking = true;
    try {
      const headers = { "Gpusched-Live": "1" };
      if (tag !== null) headers["If-None-Match"] = tag;
      const answer = await fetch(location.href, { headers, cache: "no-store", redirect: "error", credentials: "same-origin" });
      if (answer.status === 401) return location.reload();
      if (answer.status === 200 && !isTyping() && !isOpen()) {
        const text = await answer.text();
        tag = answer.headers.get("ETag");
        keep(new DOMParser().parseFromString(text, "text/html"));
      }
      if (answer.status === 200 || answer.status === 304) {
        since = null;
        say("");
      } else if (answer.status === 503) {
        since = since || new Date();
        say(`The scheduler has not answered since ${since.toLocaleTimeString()}; what is shown is from then.`);
      } else {
        return location.reload();
      }
    } catch {
      since = since || new Date();
      say(`No contact with this page's server since ${since.toLocaleTimeString()}; what is shown is from then.`);
    } finally {
      isAsking = false;
    }
    plan();
  };

  const plan = () => {
    clearTimeout(timer);
    if (pause() > 0) timer = setTimeout(look, pause());
  };

  document.addEventListener("visibilitychange", () => { if (!document.hidden && pause() > 0) look(); });
  // On a narrow screen the timeline begins a little before now.
  for (const one of document.querySelectorAll("[data-now]")) {
    const svg = one.querySelector("svg");
    one.scrollLeft = one.dataset.now * svg.clientWidth / svg.viewBox.baseVal.width - one.clientWidth / 3;
  }
  for (const log of document.querySelectorAll(".log[data-end]")) log.scrollTop = log.scrollHeight;
  plan();
})();
