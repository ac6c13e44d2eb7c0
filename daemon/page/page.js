// The page of kvkeepd: asks the daemon's own admin calls every few seconds and draws what they say.
// Text from the daemon is only ever set as text, never as markup.
'use strict';

const PERIOD_MS = 2000;
const FLEET_MS = 10000; // it is asked of the store
const CURVES = 5; // tenants whose curves are drawn
const HISTORY = 300; // points of the hit rate's line
const SVG = 'http://www.w3.org/2000/svg';
const history = [];
let token = sessionStorage.getItem('kvkeep-token') || '';
let timer = 0;
let last = null; // of the counters, to take rates from
let rows = { sequences: [], leases: [] };
let fleet = { at: 0, answer: null };

const at = (id) => document.getElementById(id);

function make(name, attributes = {}, ...children) {
  const svg = ['svg', 'rect', 'line', 'polyline', 'text', 'title'].includes(name);
  const node = svg ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

// ---- Numbers

const count = (value) => Number(value).toLocaleString('en');
const percent = (value) => (100 * value).toFixed(1) + ' %';

function bytes(value) {
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB'];
  let unit = 0;
  for (value = Number(value); value >= 1024 && unit < 5; unit++) value /= 1024;
  return (unit === 0 || value >= 100 ? value.toFixed(0) : value.toFixed(1)) + ' ' + units[unit];
}

function duration(ms) {
  const seconds = Number(ms) / 1000;
  if (seconds < 1) return Math.round(ms) + ' ms';
  if (seconds < 120) return seconds.toFixed(1) + ' s';
  if (seconds < 7200) return (seconds / 60).toFixed(1) + ' min';
  return seconds < 172800 ? (seconds / 3600).toFixed(1) + ' h' : (seconds / 86400).toFixed(1) + ' d';
}

// ---- Asking

class Refused extends Error {
  constructor(code, text) {
    super(text);
    this.code = code;
  }
}

async function ask(method, request = {}) {
  const headers = { 'Content-Type': 'application/json' };
  if (token) headers.Authorization = 'Bearer ' + token;
  const response = await fetch('/api/' + method,
    { method: 'POST', headers, body: JSON.stringify(request), cache: 'no-store' });
  if (!response.ok) throw new Refused(response.status, (await response.text()).trim());
  return response.json();
}

// Calls that an older daemon may not have.
async function askMaybe(method, request = {}) {
  try {
    return await ask(method, request);
  } catch (error) {
    if (error instanceof Refused && error.code !== 401) return null;
    throw error;
  }
}

// ---- Drawing

function bar(name, note, parts, total) {
  const svg = make('svg', { viewBox: '0 0 1000 14', preserveAspectRatio: 'none', role: 'img',
    'aria-label': name + ': ' + parts.map((part) => part.name + ' ' + part.text).join(', ') });
  svg.append(make('rect', { width: 1000, height: 14, class: 'fill-free' }));
  let x = 0;
  for (const part of parts) {
    const width = total > 0 ? 1000 * part.value / total : 0;
    const rect = make('rect', { x, width: Math.max(width, 0), height: 14, class: 'fill-' + part.kind });
    rect.append(make('title', {}, part.name + ': ' + part.text));
    svg.append(rect);
    x += width;
  }
  return make('div', { class: 'bar' },
    make('div', { class: 'head' }, make('span', {}, name), make('span', {}, note)), svg);
}

function fillKey(node, entries) {
  node.replaceChildren(...entries.flatMap(([kind, name]) =>
    [make('i', { class: 'fill-' + kind, 'aria-hidden': 'true' }), name]));
}

function table(node, titles, lines, empty) {
  const head = make('tr', {}, ...titles.map((title) =>
    make('th', { scope: 'col', class: title.text ? 'text' : '' }, title.name)));
  const body = lines.length > 0
    ? lines.map((cells) => make('tr', {}, ...cells.map((cell, i) =>
      make('td', { class: titles[i].wide ? 'wide' : titles[i].text ? 'text' : '' }, cell))))
    : [make('tr', {}, make('td', { class: 'empty', colspan: titles.length }, empty))];
  node.replaceChildren(make('thead', {}, head), make('tbody', {}, ...body));
}

function meter(used, limit) {
  const share = limit > 0 ? Math.min(used / limit, 1) : 0;
  const svg = make('svg', { class: 'meter', viewBox: '0 0 100 8', preserveAspectRatio: 'none', role: 'img',
    'aria-label': limit > 0 ? percent(share) + ' of the limit' : 'no limit' });
  svg.append(make('rect', { width: 100, height: 8, class: 'fill-free' }),
    make('rect', { width: 100 * share, height: 8, class: share > 0.9 ? 'fill-bad' : 'fill-active' }));
  return svg;
}

// Lines over [0, 1] x [0, 1], with words at the axes.
function chart(node, lines, marks, left, right, label) {
  const W = 640, H = 200, L = 44, R = 10, T = 10, B = 24;
  const x = (value) => L + value * (W - L - R);
  const y = (value) => H - B - value * (H - T - B);
  const svg = make('svg', { viewBox: `0 0 ${W} ${H}`, role: 'img', 'aria-label': label });
  for (const level of [0, 0.25, 0.5, 0.75, 1]) {
    svg.append(make('line', { class: 'grid', x1: L, x2: W - R, y1: y(level), y2: y(level) }),
      make('text', { x: L - 6, y: y(level) + 4, 'text-anchor': 'end' }, 100 * level + ' %'));
  }
  for (const line of lines) {
    svg.append(make('polyline', { class: line.kind,
      points: line.points.map(([px, py]) => x(px).toFixed(1) + ',' + y(py).toFixed(1)).join(' ') }));
  }
  for (const mark of marks) {
    svg.append(make('line', { class: 'mark', x1: x(mark.at), x2: x(mark.at), y1: T, y2: H - B }),
      make('text', mark.at < 0.7 ? { x: x(mark.at) + 4, y: H - B - 6 }
        : { x: x(mark.at) - 4, y: H - B - 6, 'text-anchor': 'end' }, mark.name));
  }
  svg.append(make('text', { x: L, y: H - 6 }, left),
    make('text', { x: W - R, y: H - 6, 'text-anchor': 'end' }, right));
  node.replaceChildren(svg);
}

function nothing(node, text) {
  node.replaceChildren(make('p', { class: 'empty' }, text));
}

// ---- Sections

function statMap(stats) {
  return new Map(stats.stats.map((stat) => [stat.name, stat.value]));
}

function showTiles(stats, info) {
  const now = { at: Date.now(), looked: stats.get('kvkeep_lookup_tokens_total') || 0,
    hit: stats.get('kvkeep_hit_tokens_total') || 0, lookups: stats.get('kvkeep_lookup_total') || 0 };
  const since = last && now.looked >= last.looked ? last : null;
  const seconds = since ? (now.at - since.at) / 1000 : 0;
  const looked = since ? now.looked - since.looked : 0;
  if (looked > 0) history.push({ at: now.at, rate: (now.hit - since.hit) / looked });
  if (history.length > HISTORY) history.shift();
  last = now;
  const tiles = [
    ['hit rate, all time', now.looked > 0 ? percent(now.hit / now.looked) : '–'],
    ['look-ups a second', seconds > 0 ? count(Math.round((now.lookups - since.lookups) / seconds)) : '–'],
    ['tokens hit', count(now.hit)],
    ['computing saved', duration(1000 * (stats.get('kvkeep_saved_seconds_total') || 0))],
    ['sequences', count(stats.get('kvkeep_sequences') || 0)],
    ['leases', count(stats.get('kvkeep_leases') || 0)],
    ['refusals', count(stats.get('kvkeep_refusals_total') || 0)],
    ['up', duration(info.uptime_ms)],
  ];
  at('tiles').replaceChildren(...tiles.map(([name, value]) =>
    make('div', {}, make('dt', {}, name), make('dd', {}, value))));
}

function showTiers(occupancy, why) {
  const tiers = occupancy.tiers.filter((tier) => tier.limit_bytes > 0);
  at('tiers').replaceChildren(...tiers.map((tier) => {
    const detail = why.tiers.find((row) => row.tier === tier.tier) || {};
    const evictable = detail.evictable_bytes || 0;
    const active = detail.active_bytes || 0;
    const leased = detail.leased_bytes || 0;
    const other = Math.max(tier.used_bytes - active - leased - evictable, 0);
    const part = (name, kind, value) => ({ name, kind, value, text: bytes(value) });
    return bar(tier.tier, bytes(tier.used_bytes) + ' of ' + bytes(tier.limit_bytes), [
      part('active', 'active', active), part('leased', 'leased', leased),
      part('cached', 'evictable', evictable), part('other', 'other', other)], tier.limit_bytes);
  }));
  fillKey(at('tier-key'), [['active', 'active'], ['leased', 'leased'],
    ['evictable', 'cached, may be evicted'], ['other', 'copying, quarantined or waiting'], ['free', 'free']]);
}

function showTenants(usage) {
  const titles = [{ name: 'tenant', text: true }, { name: 'tier', text: true }, { name: 'used' },
    { name: 'guaranteed' }, { name: 'limit' }, { name: '', text: true }, { name: 'hit rate' },
    { name: 'sequences' }, { name: 'leases' }, { name: 'refused' }];
  const lines = [];
  for (const row of usage.rows) {
    const rate = row.lookup_tokens > 0 ? percent(row.hit_tokens / row.lookup_tokens) : '–';
    const tiers = row.tiers.filter((tier) => tier.used_bytes > 0 || tier.limit_bytes > 0);
    const shown = tiers.length > 0 ? tiers : row.tiers.slice(0, 1);
    shown.forEach((tier, i) => lines.push([i === 0 ? row.tenant : '', tier.tier, bytes(tier.used_bytes),
      tier.guaranteed_bytes > 0 ? bytes(tier.guaranteed_bytes) : '–',
      tier.limit_bytes > 0 ? bytes(tier.limit_bytes) : '–', meter(tier.used_bytes, tier.limit_bytes),
      i === 0 ? rate : '', i === 0 ? count(row.sequences) : '', i === 0 ? count(row.leases) : '',
      i === 0 ? count(row.refusals) : '']));
  }
  table(at('tenants'), titles, lines, 'no tenant has been here yet');
}

function showRate(ceiling) {
  if (history.length < 2) {
    nothing(at('rate'), 'drawn as soon as there are look-ups');
    at('rate-key').textContent = '';
    return;
  }
  const first = history[0].at;
  const span = Math.max(history[history.length - 1].at - first, 1);
  const lines = [{ kind: 'rate', points: history.map((point) => [(point.at - first) / span, point.rate]) }];
  if (ceiling !== null) lines.push({ kind: 'ceiling', points: [[0, ceiling], [1, ceiling]] });
  chart(at('rate'), lines, [], duration(span) + ' ago', 'now', 'hit rate over time');
  at('rate-key').textContent = ceiling === null ? 'tokens hit of tokens looked up'
    : 'tokens hit of tokens looked up; dashed: what an endless cache would hit (' + percent(ceiling) + ')';
}

function showStates(stats) {
  const kinds = { ACTIVE: 'active', RESERVED: 'active', SEALED: 'active', SHARED: 'leased',
    EVICTABLE: 'evictable', HOLLOW: 'free' };
  const states = Object.keys(kinds).map((state) =>
    [state, stats.get(`kvkeep_blocks{state="${state}"}`) || 0]);
  const most = Math.max(...states.map(([, value]) => value), 1);
  at('states').replaceChildren(...states.map(([state, value]) => bar(state.toLowerCase(), count(value),
    [{ name: state.toLowerCase(), kind: kinds[state], value, text: count(value) }], most)));
}

// Of tenants that have asked enough, the busiest first.
function curvesOf(ratio) {
  const curves = ratio ? ratio.curves.filter((curve) => curve.points.length > 1) : [];
  return curves.sort((a, b) => b.references - a.references);
}

// What an endless cache would hit, over all tenants.
function ceilingOf(curves) {
  const references = curves.reduce((sum, curve) => sum + curve.references, 0);
  return references > 0
    ? curves.reduce((sum, curve) => sum + curve.references * curve.ceiling.hits, 0) / references : null;
}

// One line for each of the busiest tenants; how much the first has now is marked.
function showCurves(all) {
  const curves = all.slice(0, CURVES);
  if (curves.length === 0) {
    nothing(at('curve'), 'drawn as soon as enough look-ups were sampled');
    at('curve-key').replaceChildren();
    return;
  }
  const most = Math.max(...curves.map((curve) => curve.points[curve.points.length - 1].size_bytes), 1);
  chart(at('curve'), curves.map((curve, i) => ({ kind: 'rate line-' + i,
    points: curve.points.map((point) => [point.size_bytes / most, point.hits]) })),
  [{ at: Math.min(curves[0].now_bytes / most, 1), name: curves[0].tenant + ' now' }], '0 B', bytes(most),
  'hit ratio against bytes of memory');
  at('curve-key').replaceChildren(...curves.flatMap((curve, i) => [
    make('i', { class: 'key-' + i, 'aria-hidden': 'true' }),
    `${curve.tenant}: now ${percent(curve.now.hits)}, twice the memory ${percent(curve.twice.hits)}, ` +
      `endless ${percent(curve.ceiling.hits)}`, make('br')]),
  'hit ratio of an LRU cache of that size, from sampled reuse distances');
}

function showDoctor(doctor) {
  const list = at('doctor');
  if (doctor === null) {
    list.replaceChildren(make('li', {}, 'this daemon has no doctor'));
    return;
  }
  if (doctor.findings.length === 0) {
    list.replaceChildren(make('li', { class: 'good' }, `nothing to report, ${doctor.checks} things looked at`));
    return;
  }
  list.replaceChildren(...doctor.findings.map((finding) =>
    make('li', { class: finding.severity }, make('strong', {}, finding.title), finding.evidence,
      make('small', {}, finding.action))));
}

// Nodes that share this daemon's store; hidden where it shares none.
function showFleet(remote, answer) {
  at('fleet-section').hidden = !remote;
  if (!remote) return;
  at('store').textContent = `store: ${remote.state}` +
    (remote.nodes_away > 0 ? `, ${remote.nodes_away} of ${remote.nodes} of its nodes away` : '') +
    (remote.spaces_out > 0 ? `, not in use for ${remote.spaces_out} of ${remote.spaces} spaces` : '') +
    `; this node fetched ${bytes(remote.fetched_bytes)} (${count(remote.fetched_tokens)} tokens) and sent ` +
    bytes(remote.sent_bytes) + (remote.reason ? `; last failure: ${remote.reason}` : '');
  const nodes = answer ? answer.nodes : [];
  const tiers = ['device', 'host', 'disk'];
  table(at('fleet'), [{ name: 'node', text: true }, { name: 'address', text: true }, { name: 'up' },
    ...tiers.flatMap((name) => [{ name }, { name: '', text: true }]), { name: 'hit rate' },
    { name: 'fetched' }, { name: 'sent' }, { name: 'store', text: true }],
  nodes.map((node) => [node.name + (node.self ? ' (this one)' : '') + (node.draining ? ', draining' : ''),
    node.address || '–', duration(1000 * node.up_s),
    ...tiers.flatMap((name, i) => {
      const tier = node.tiers[i] || { used_bytes: 0, limit_bytes: 0 };
      return tier.limit_bytes > 0 ? [bytes(tier.used_bytes), meter(tier.used_bytes, tier.limit_bytes)] : ['–', ''];
    }),
    node.lookup_tokens > 0 ? percent(node.hit_tokens / node.lookup_tokens) : '–',
    bytes(node.fetched_bytes), bytes(node.sent_bytes), node.store_state]),
  answer ? 'no node has said anything yet' : 'the store does not answer');
}

function showWhy(why) {
  at('advice').textContent = why.advice;
  table(at('why'), [{ name: 'ago' }, { name: 'tenant', text: true }, { name: 'call', text: true },
    { name: 'cause', text: true }, { name: 'why', text: true, wide: true }],
  why.refusals.map((row) => [duration(row.age_ms), row.tenant, row.call,
    row.detail.cause.replaceAll('_', ' '), row.detail.message]), 'nothing was refused');
}

function matches(id, row) {
  const wanted = at(id).value.trim().toLowerCase();
  return !wanted || Object.values(row).some((value) => String(value).toLowerCase().includes(wanted));
}

function showLists() {
  table(at('sequences'), [{ name: 'sequence', text: true }, { name: 'tenant', text: true },
    { name: 'state', text: true }, { name: 'tokens' }, { name: 'cached' }, { name: 'blocks' },
    { name: 'shared' }, { name: 'age' }],
  rows.sequences.filter((row) => matches('sequence-search', row)).slice(0, 200).map((row) =>
    [row.sequence_id, row.tenant, row.state.replaceAll('_', ' '), count(row.length),
      count(row.cached_tokens), count(row.blocks), count(row.shared_blocks), duration(row.age_ms)]),
  rows.sequences.length > 0 ? 'none matches' : 'none is open');
  table(at('leases'), [{ name: 'lease', text: true }, { name: 'tenant', text: true },
    { name: 'owner', text: true }, { name: 'tokens' }, { name: 'blocks' }, { name: 'age' }, { name: 'left' }],
  rows.leases.filter((row) => matches('lease-search', row)).slice(0, 200).map((row) =>
    [row.lease_id, row.tenant, row.instance_name || row.instance_id, count(row.tokens), count(row.blocks),
      duration(row.age_ms), duration(row.ttl_ms)]),
  rows.leases.length > 0 ? 'none matches' : 'none is open');
}

// ---- The round

async function round() {
  const info = await ask('GetServerInfo');
  const [occupancy, usage, stats, why, sequences, leases, doctor, ratio] = await Promise.all([
    ask('GetOccupancy'), ask('GetUsage'), ask('GetStats').then(statMap), ask('Why'),
    ask('ListSequences'), ask('ListLeases'), askMaybe('Doctor'), askMaybe('GetMissRatio')]);
  at('about').textContent = `version ${info.version}, ${info.device} (${info.device_path}), ` +
    `policy ${info.policy}`;
  showTiles(stats, info);
  showTiers(occupancy, why);
  showTenants(usage);
  const curves = curvesOf(ratio);
  showRate(ceilingOf(curves));
  showStates(stats);
  showCurves(curves);
  showDoctor(doctor);
  if (occupancy.remote && Date.now() - fleet.at > FLEET_MS) {
    fleet = { at: Date.now(), answer: await askMaybe('GetFleet') };
  }
  showFleet(occupancy.remote, fleet.answer);
  showWhy(why);
  rows = { sequences: sequences.sequences, leases: leases.leases };
  showLists();
}

function showState(text, bad) {
  at('state').textContent = text;
  at('state').classList.toggle('bad', bad);
}

function askForToken(text) {
  at('main').hidden = true;
  at('login').hidden = false;
  at('login-error').textContent = text;
  at('about').textContent = '';
  showState('', false);
  at('token').focus();
}

async function tick() {
  clearTimeout(timer);
  try {
    await round();
    at('login').hidden = true;
    at('main').hidden = false;
    showState('live', false);
  } catch (error) {
    if (error instanceof Refused && (error.code === 401 || error.code === 403)) {
      askForToken(token ? error.message : '');
      return;
    }
    showState(error instanceof Refused ? error.message : 'the daemon does not answer; trying again', true);
  }
  timer = setTimeout(tick, document.hidden ? 10 * PERIOD_MS : PERIOD_MS);
}

at('login').addEventListener('submit', (event) => {
  event.preventDefault();
  token = at('token').value.trim();
  sessionStorage.setItem('kvkeep-token', token);
  at('token').value = '';
  tick();
});
at('sequence-search').addEventListener('input', showLists);
at('lease-search').addEventListener('input', showLists);
document.addEventListener('visibilitychange', () => { if (!document.hidden && !at('main').hidden) tick(); });
tick();
