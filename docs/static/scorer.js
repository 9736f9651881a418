// What a search finds first: the pages that say how to do something, and behind them those that prove, measure or list it.
const BEHIND = new Set([
  "api", "benchmarks", "changelog", "comparison", "compatibility", "guarantees-in-detail", "how-it-is-tested", "how-it-works",
]);

// A page that has the word in its title comes before one that has it in a heading.
const WORDS = (new URLSearchParams(location.search).get("q") ?? "").toLowerCase().split(/\s+/).filter(Boolean);
const isNamed = (title) => WORDS.some((word) => title.toLowerCase().includes(word));

var Scorer = {
  score: ([page, title, , , score]) => score - (BEHIND.has(page) ? 4 : 0) + (isNamed(title) ? 2 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: {0: 15, 1: 5, 2: -5},
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
