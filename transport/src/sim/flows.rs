//! Max-min fair sharing of links between transfers, recomputed when a transfer begins or ends.
//!
//! A flow over several routes loads each link with its share, and has one rate.
//!
//! **Invariant:** no link carries more than its bandwidth. The rate of a flow can grow only if
//! another flow with no higher rate gets slower. Arithmetic is in integers, so results do not
//! depend on the machine. A flow whose links never have more than 16 flows ends at the exact
//! nanosecond, rounded up.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::Rank;
use crate::clock::Nanos;
use crate::sim::network::{LinkId, Network, Route};

/// Names a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FlowId(pub u64);

/// Rates are counted in this fraction of a byte a second: every number up to 16 divides it.
const RATE_UNITS: u128 = 720_720;
const NANOS_PER_S: u128 = 1_000_000_000;

/// The share of a flow on a link is counted in this fraction of the flow.
const SHARE_UNITS: u64 = 1 << 20;

#[derive(Debug)]
struct Flow {
    /// The share of the flow on each link.
    route: Vec<(LinkId, u64)>,
    bytes: u64,
    /// In `1 / (RATE_UNITS * NANOS_PER_S)` of a byte, as of `settled_at`.
    left: u128,
    /// In `1 / RATE_UNITS` of a byte a second.
    rate: u128,
    settled_at: Nanos,
    ends_at: Nanos,
}

impl Flow {
    fn left_at(&self, now: Nanos) -> u128 {
        self.left.saturating_sub(self.rate * u128::from(now.0.saturating_sub(self.settled_at.0)))
    }
}

/// The flows under way over a network.
#[derive(Debug)]
pub struct Flows {
    network: Arc<Network>,
    flows: BTreeMap<FlowId, Flow>,
    over_link: BTreeMap<LinkId, BTreeSet<FlowId>>,
    ends: BTreeSet<(Nanos, FlowId)>,
    next: u64,
}

impl Flows {
    /// A network without flows.
    #[must_use]
    pub fn new(network: Arc<Network>) -> Self {
        Self { network, flows: BTreeMap::new(), over_link: BTreeMap::new(), ends: BTreeSet::new(), next: 0 }
    }

    /// Starts to send `bytes` from one rank to another. `now` never goes backwards.
    pub fn start(&mut self, now: Nanos, from: Rank, to: Rank, bytes: u64) -> FlowId {
        let id = FlowId(self.next);
        self.next += 1;
        let route = shares(self.network.routes(from, to));
        for &(link, _) in &route {
            self.over_link.entry(link).or_default().insert(id);
        }
        let left = u128::from(bytes) * RATE_UNITS * NANOS_PER_S;
        let flow = Flow { route: route.clone(), bytes, left, rate: 0, settled_at: now, ends_at: now };
        self.ends.insert((now, id));
        self.flows.insert(id, flow);
        self.share(now, &route);
        id
    }

    /// Ends a flow, whether all its bytes were sent or not. Ending it again does nothing.
    pub fn stop(&mut self, now: Nanos, id: FlowId) {
        let Some(flow) = self.flows.remove(&id) else { return };
        self.ends.remove(&(flow.ends_at, id));
        for (link, _) in &flow.route {
            if let Some(users) = self.over_link.get_mut(link) {
                users.remove(&id);
                if users.is_empty() {
                    self.over_link.remove(link);
                }
            }
        }
        self.share(now, &flow.route);
    }

    /// The flow whose last byte enters the wire next, and when, if none begins or ends before.
    #[must_use]
    pub fn next_end(&self) -> Option<(Nanos, FlowId)> {
        self.ends.first().copied()
    }

    /// The whole bytes of a flow that have entered the wire by `now`; `None` when it was stopped.
    #[must_use]
    pub fn sent(&self, now: Nanos, id: FlowId) -> Option<u64> {
        let flow = self.flows.get(&id)?;
        let left = flow.left_at(now).div_ceil(RATE_UNITS * NANOS_PER_S);
        Some(flow.bytes - u64::try_from(left).unwrap_or(u64::MAX).min(flow.bytes))
    }

    /// When the flow's last byte enters the wire if no flow begins or ends before; `None` when it
    /// was stopped.
    #[must_use]
    pub fn ends_at(&self, id: FlowId) -> Option<Nanos> {
        self.flows.get(&id).map(|flow| flow.ends_at)
    }

    /// Recomputes the rates on all links that compete, over any number of flows, with those of
    /// `route`.
    fn share(&mut self, now: Nanos, route: &[(LinkId, u64)]) {
        let (links, flows) = self.competing(route);
        let mut capacity: BTreeMap<LinkId, u128> = links
            .iter()
            .map(|&link| (link, u128::from(self.network.link(link).bytes_per_s) * RATE_UNITS))
            .collect();
        let mut open: BTreeMap<LinkId, BTreeSet<FlowId>> =
            links.iter().filter_map(|&link| Some((link, self.over_link.get(&link)?.clone()))).collect();
        let mut loads: BTreeMap<LinkId, u64> = BTreeMap::new();
        for &(link, part) in flows.iter().flat_map(|id| &self.flows[id].route) {
            *loads.entry(link).or_default() += part;
        }
        let mut rates: BTreeMap<FlowId, u128> = BTreeMap::new();
        // Water filling: the link with the smallest fair share limits its flows; remove them and go
        // on.
        while let Some((share, bottleneck)) = open
            .keys()
            .map(|&link| (capacity[&link] * u128::from(SHARE_UNITS) / u128::from(loads[&link]), link))
            .min()
        {
            for id in open.remove(&bottleneck).unwrap_or_default() {
                rates.insert(id, share);
                for &(link, part) in &self.flows[&id].route {
                    if let Some(left) = capacity.get_mut(&link) {
                        let used = (share * u128::from(part)).div_ceil(u128::from(SHARE_UNITS));
                        *left = left.saturating_sub(used);
                    }
                    if let Some(load) = loads.get_mut(&link) {
                        *load -= part;
                    }
                    if let Some(users) = open.get_mut(&link) {
                        users.remove(&id);
                        if users.is_empty() {
                            open.remove(&link);
                        }
                    }
                }
            }
        }
        for id in flows {
            // A share of zero happens only with more flows than units of bandwidth; keep it moving.
            self.settle(now, id, rates.get(&id).copied().unwrap_or(1).max(1));
        }
    }

    fn competing(&self, route: &[(LinkId, u64)]) -> (BTreeSet<LinkId>, BTreeSet<FlowId>) {
        let mut links: BTreeSet<LinkId> = route.iter().map(|&(link, _)| link).collect();
        let mut flows = BTreeSet::new();
        let mut unseen: Vec<LinkId> = links.iter().copied().collect();
        while let Some(link) = unseen.pop() {
            for &id in self.over_link.get(&link).into_iter().flatten() {
                if flows.insert(id) {
                    let route = self.flows[&id].route.iter().map(|&(next, _)| next);
                    unseen.extend(route.filter(|&next| links.insert(next)));
                }
            }
        }
        (links, flows)
    }

    fn settle(&mut self, now: Nanos, id: FlowId, rate: u128) {
        let Some(flow) = self.flows.get_mut(&id) else { return };
        self.ends.remove(&(flow.ends_at, id));
        flow.left = flow.left_at(now);
        flow.settled_at = now;
        flow.rate = rate;
        let wait = u64::try_from(flow.left.div_ceil(rate)).unwrap_or(u64::MAX);
        flow.ends_at = Nanos(now.0.saturating_add(wait));
        self.ends.insert((flow.ends_at, id));
    }
}

/// The share of the bytes on each link, every share at least one unit.
fn shares(routes: &[Route]) -> Vec<(LinkId, u64)> {
    let sum: u128 = routes.iter().map(|route| u128::from(route.weight)).sum();
    let mut parts: BTreeMap<LinkId, u64> = BTreeMap::new();
    let (mut before, mut given) = (0, 0);
    for route in routes {
        before += u128::from(route.weight);
        let end = (u128::from(SHARE_UNITS) * before / sum) as u64;
        for &link in &route.links {
            *parts.entry(link).or_default() += (end - given).max(1);
        }
        given = end;
    }
    parts.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::sim::network::NodeId;

    const GB_PER_S: u64 = 1_000_000_000;

    fn flows(network: Network) -> Flows {
        Flows::new(Arc::new(network))
    }

    #[test]
    fn a_flow_alone_ends_at_the_exact_nanosecond() {
        let mut flows = flows(Network::full_mesh(2, 3 * GB_PER_S, Duration::ZERO));
        let id = flows.start(Nanos(17), 0, 1, 9_000);
        assert_eq!(flows.next_end(), Some((Nanos(17 + 3_000), id)));
        let mut odd = self::flows(Network::full_mesh(2, 3 * GB_PER_S, Duration::ZERO));
        let id = odd.start(Nanos(0), 0, 1, 10);
        assert_eq!(odd.next_end(), Some((Nanos(4), id)), "3.33 ns are rounded up");
    }

    #[test]
    fn two_flows_share_a_link_half_and_half_and_the_rest_goes_at_full_speed() {
        let mut flows = flows(Network::full_mesh(2, GB_PER_S, Duration::ZERO));
        let long = flows.start(Nanos(0), 0, 1, 3_000);
        let short = flows.start(Nanos(0), 0, 1, 1_000);
        assert_eq!(flows.next_end(), Some((Nanos(2_000), short)));
        assert_eq!(flows.sent(Nanos(1_000), long), Some(500));
        flows.stop(Nanos(2_000), short);
        assert_eq!(flows.next_end(), Some((Nanos(4_000), long)), "1,000 B in 2 µs, then 2,000 B in 2 µs");
    }

    #[test]
    fn the_two_directions_of_a_wire_do_not_compete() {
        let mut flows = flows(Network::full_mesh(2, GB_PER_S, Duration::ZERO));
        let there = flows.start(Nanos(0), 0, 1, 1_000);
        let back = flows.start(Nanos(0), 1, 0, 1_000);
        assert_eq!(flows.ends_at(there), Some(Nanos(1_000)));
        assert_eq!(flows.ends_at(back), Some(Nanos(1_000)));
    }

    #[test]
    fn the_textbook_line_of_three_flows_is_shared_max_min_fair() {
        // Flow a crosses both links (10 and 4 GB/s), b only the first, c only the second: a and c
        // get 2, b gets 8.
        let mut builder = Network::builder(3);
        builder.wire(NodeId(0), NodeId(1), 10 * GB_PER_S, Duration::ZERO);
        builder.wire(NodeId(1), NodeId(2), 4 * GB_PER_S, Duration::ZERO);
        let mut flows = flows(builder.build().expect("a line"));
        let a = flows.start(Nanos(0), 0, 2, 8_000);
        let b = flows.start(Nanos(0), 0, 1, 8_000);
        let c = flows.start(Nanos(0), 1, 2, 8_000);
        assert_eq!(flows.ends_at(a), Some(Nanos(4_000)));
        assert_eq!(flows.ends_at(b), Some(Nanos(1_000)));
        assert_eq!(flows.ends_at(c), Some(Nanos(4_000)));
        flows.stop(Nanos(1_000), b);
        assert_eq!(flows.ends_at(a), Some(Nanos(4_000)), "the second link still limits it");
        flows.stop(Nanos(2_000), c);
        assert_eq!(flows.ends_at(a), Some(Nanos(3_000)), "4,000 B left at 4 GB/s");
    }

    #[test]
    fn a_flow_over_two_routes_loads_each_by_its_weight_and_goes_as_fast_as_both_allow() {
        // Three quarters over a wire of 3 GB/s, a quarter over one of 1 GB/s: 4 GB/s together.
        let mut builder = Network::builder(2);
        let [wide, _] = builder.wire(NodeId(0), NodeId(1), 3 * GB_PER_S, Duration::ZERO);
        let [narrow, _] = builder.wire(NodeId(0), NodeId(1), GB_PER_S, Duration::ZERO);
        let route = |link, weight| Route { links: vec![link], weight };
        builder.routes(0, 1, vec![route(wide, 3), route(narrow, 1)]);
        let mut flows = flows(builder.build().expect("paths"));
        let one = flows.start(Nanos(0), 0, 1, 8_000);
        assert_eq!(flows.ends_at(one), Some(Nanos(2_000)));
        let other = flows.start(Nanos(1_000), 0, 1, 2_000);
        assert_eq!((flows.ends_at(one), flows.ends_at(other)), (Some(Nanos(3_000)), Some(Nanos(2_000))));
    }

    #[test]
    fn a_link_carries_what_it_can_and_no_more_whatever_comes_and_goes() {
        let mut random = crate::sim::Random::new(3);
        let mut flows = flows(Network::star(6, GB_PER_S, Duration::ZERO));
        let mut live: Vec<FlowId> = Vec::new();
        for step in 0..400u64 {
            let now = Nanos(step * 50);
            if live.is_empty() || random.chance(600_000) {
                let from = random.below(6) as Rank;
                let to = (from + 1 + random.below(5) as Rank) % 6;
                live.push(flows.start(now, from, to, 1 + random.below(100_000)));
            } else {
                let id = live.swap_remove(random.index(live.len()));
                flows.stop(now, id);
            }
            for (link, users) in &flows.over_link {
                let used: u128 = users.iter().map(|id| flows.flows[id].rate).sum();
                assert!(used <= u128::from(GB_PER_S) * RATE_UNITS, "{link:?} carries {used}");
            }
            for id in &live {
                let flow = &flows.flows[id];
                let limited = flow.route.iter().any(|(link, _)| {
                    let users = &flows.over_link[link];
                    let used: u128 = users.iter().map(|user| flows.flows[user].rate).sum();
                    let full = used + users.len() as u128 >= u128::from(GB_PER_S) * RATE_UNITS;
                    full && users.iter().all(|user| flows.flows[user].rate <= flow.rate + RATE_UNITS)
                });
                assert!(limited, "{id:?} could be faster at no slower flow's cost");
            }
        }
    }
}
