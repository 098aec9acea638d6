//! What packing has to reach.

use std::fmt;
use std::time::Duration;

use pleach::Collective;
use pleach::packing::allocations::allocations;
use pleach::packing::topology::{LATENCY_NS, NodeId, Topology, preset};
use pleach::packing::{PackOptions, Packing, check, pack};
use pleach_transport::clock;

/// Topologies, what is packed on each, and what is demanded.
pub(crate) struct Target {
    pub(crate) name: &'static str,
    topologies: Vec<Topology>,
    collectives: Vec<Collective>,
    trees_per_root: Option<u32>,
    /// Whether the optimum has to be reached; elsewhere the gap is printed.
    is_exact: bool,
    /// For all of it.
    limit: Duration,
}

/// What came out.
pub(crate) struct Finding {
    pub(crate) name: &'static str,
    pub(crate) packings: usize,
    pub(crate) trees: usize,
    /// The median over rounds.
    pub(crate) time: Duration,
    pub(crate) limit: Duration,
    /// How long the checker took for all of them, once.
    pub(crate) checked_in: Duration,
    /// Rate by bound of the packing that is farthest from it.
    pub(crate) least_share: f64,
    /// Rates of a target of one topology, in GB/s.
    pub(crate) rates: Vec<(Collective, f64)>,
    /// What is wrong or not as good as it has to be.
    pub(crate) failures: Vec<String>,
}

/// Broadcast, all-gather and all-reduce.
const THREE: [Collective; 3] =
    [Collective::Broadcast { root: 0 }, Collective::AllGather, Collective::AllReduce];

/// Presets of 64 ranks.
const OF_64: [&str; 10] = [
    "dgx-a100:8",
    "dgx-h100:8",
    "mi250:4",
    "ring:64",
    "mesh:64",
    "torus:8x8",
    "torus:4x4x4",
    "star:64",
    "fat-tree:6",
    "dragonfly:4,4,4",
];

/// All of them.
pub(crate) fn targets() -> Result<Vec<Target>, String> {
    let made = |name: &str| preset(name).map_err(|error| format!("{name}: {error}"));
    let milliseconds = Duration::from_millis;
    let mut targets = vec![
        Target {
            name: "all 46 and 14 allocations of dgx-1v and dgx-1p",
            topologies: [made("dgx-1v")?, made("dgx-1p")?]
                .iter()
                .flat_map(|server| allocations(server, 3..=8))
                .map(|allocation| allocation.topology)
                .collect(),
            collectives: THREE.to_vec(),
            trees_per_root: None,
            is_exact: true,
            limit: milliseconds(1_000),
        },
        Target {
            name: "dgx-a100:2 all-gather",
            topologies: vec![made("dgx-a100:2")?],
            collectives: vec![Collective::AllGather],
            trees_per_root: None,
            is_exact: true,
            limit: milliseconds(50),
        },
        Target {
            name: "mi250:1 all-gather",
            topologies: vec![made("mi250:1")?],
            collectives: vec![Collective::AllGather],
            trees_per_root: None,
            is_exact: true,
            limit: milliseconds(20),
        },
    ];
    for name in OF_64 {
        for collective in THREE {
            targets.push(Target {
                name,
                topologies: vec![made(name)?],
                collectives: vec![collective],
                trees_per_root: None,
                is_exact: true,
                limit: milliseconds(2_000),
            });
        }
    }
    let large = made("dgx-h100:128")?;
    for (name, topology, collective, trees_per_root) in [
        ("dgx-h100:128 all-gather, one tree a root", large.clone(), Collective::AllGather, Some(1)),
        ("dgx-h100:128 all-gather, nodes shuffled", shuffled(&large), Collective::AllGather, Some(1)),
        ("dgx-h100:128 all-reduce", large.clone(), Collective::AllReduce, None),
        ("dgx-h100:128 all-reduce, nodes shuffled", shuffled(&large), Collective::AllReduce, None),
        ("dgx-h100:128 broadcast", large.clone(), Collective::Broadcast { root: 0 }, None),
        ("dgx-h100:128 broadcast, nodes shuffled", shuffled(&large), Collective::Broadcast { root: 0 }, None),
    ] {
        targets.push(Target {
            name,
            topologies: vec![topology],
            collectives: vec![collective],
            trees_per_root,
            is_exact: false,
            limit: milliseconds(60_000),
        });
    }
    for collective in THREE {
        targets.push(Target {
            name: "400 ranks, 100,000 links without symmetry",
            topologies: vec![irregular(400, 50_000)?],
            collectives: vec![collective],
            trees_per_root: None,
            is_exact: false,
            limit: milliseconds(60_000),
        });
    }
    Ok(targets)
}

/// Numbers below a limit each: a linear congruential generator (Knuth's MMIX), of which the upper
/// bits are used.
fn numbers() -> impl FnMut(u64) -> u64 {
    let mut state = 1_u64;
    move |limit| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % limit
    }
}

/// The same with nodes in another order.
fn shuffled(topology: &Topology) -> Topology {
    let mut below = numbers();
    let mut order: Vec<NodeId> = (0..topology.nodes().len() as u32).map(NodeId).collect();
    for place in 1..order.len() {
        order.swap(place, below(place as u64 + 1) as usize);
    }
    topology.in_order(&order)
}

/// Random pairs of ranks, each joined by a link of its own bandwidth, as a generator of numbers
/// picks them.
fn irregular(ranks: u32, pairs: u32) -> Result<Topology, String> {
    let mut below = numbers();
    let mut builder = Topology::builder();
    let nodes: Vec<_> = (0..ranks).map(|rank| builder.rank(format!("r{rank}"))).collect();
    let mut joined = std::collections::BTreeSet::new();
    while joined.len() < pairs as usize {
        let (one, other) = (below(ranks.into()) as usize, below(ranks.into()) as usize);
        if one < other && joined.insert((one, other)) {
            builder.duplex(nodes[one], nodes[other], 10_000_000_000 + below(40_000_000_000), LATENCY_NS);
        }
    }
    builder.build().map_err(|error| error.to_string())
}

impl Target {
    /// Packs everything so often, and checks it once.
    pub(crate) fn measure(&self, rounds: u32) -> Finding {
        let options = PackOptions { trees_per_root: self.trees_per_root, ..PackOptions::default() };
        let mut times = Vec::new();
        let mut packings = Vec::new();
        // What takes longer than everything is allowed to is measured once.
        while times.len() < rounds as usize
            && times.iter().sum::<Duration>() <= self.limit.max(Duration::from_secs(2))
        {
            packings.clear();
            let begin = clock::now();
            for topology in &self.topologies {
                for &collective in &self.collectives {
                    packings.push((topology, collective, pack(topology, collective, &options)));
                }
            }
            times.push(clock::now().since(begin));
        }
        times.sort_unstable();
        let mut finding = Finding {
            name: self.name,
            packings: packings.len(),
            trees: 0,
            time: times[times.len() / 2],
            limit: self.limit,
            checked_in: Duration::ZERO,
            least_share: 1.0,
            rates: Vec::new(),
            failures: Vec::new(),
        };
        let begin = clock::now();
        for (topology, collective, packing) in &packings {
            match packing {
                Ok(packing) => self.look_at(&mut finding, topology, packing),
                Err(error) => finding.failures.push(format!("{collective}: {error}")),
            }
        }
        finding.checked_in = clock::now().since(begin);
        finding
    }

    fn look_at(&self, finding: &mut Finding, topology: &Topology, packing: &Packing) {
        let collective = packing.collective;
        if let Err(flaw) = check(topology, packing) {
            return finding.failures.push(format!("{collective}: {flaw}"));
        }
        if self.is_exact && !packing.is_optimal() {
            let (rate, bound) = (packing.rate, packing.bound);
            finding.failures.push(format!("{collective}: {rate} bytes/s, and the bound is {bound}"));
        }
        finding.trees += packing.trees.len();
        finding.least_share = finding.least_share.min(as_f64(packing.rate / packing.bound));
        if self.topologies.len() == 1 {
            finding.rates.push((collective, as_f64(packing.rate) / 1e9));
        }
    }
}

/// A rate as a number to print.
pub(crate) fn as_f64(rate: pleach::packing::Rate) -> f64 {
    *rate.numer() as f64 / *rate.denom() as f64
}

impl Finding {
    pub(crate) const HEAD: &str = "verdict  within      took        checked in  of bound   trees  what";

    /// The collective of a target that has one.
    pub(crate) fn what(&self) -> String {
        match self.rates.as_slice() {
            [(collective, rate)] if self.name.contains(' ') => {
                format!("{}: {rate:.2} GB/s ({collective})", self.name)
            }
            [(collective, rate)] => format!("{} {collective}: {rate:.2} GB/s", self.name),
            _ => format!("{}: {} packings", self.name, self.packings),
        }
    }

    /// Whether it was as good and as fast as it has to be.
    pub(crate) fn verdict(&self) -> &'static str {
        match (self.failures.is_empty(), self.time <= self.limit) {
            (true, true) => "met",
            (true, false) => "slow",
            (false, _) => "FAILED",
        }
    }
}

/// Milliseconds with three digits that count.
pub(crate) fn milliseconds(time: Duration) -> String {
    let milliseconds = time.as_secs_f64() * 1e3;
    match milliseconds {
        0.0..10.0 => format!("{milliseconds:.2} ms"),
        10.0..100.0 => format!("{milliseconds:.1} ms"),
        _ => format!("{milliseconds:.0} ms"),
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "{:<8} {:<11} {:<11} {:<11} {:<9.4} {:>6}  {}",
            self.verdict(),
            milliseconds(self.limit),
            milliseconds(self.time),
            milliseconds(self.checked_in),
            self.least_share,
            self.trees,
            self.what()
        )?;
        for failure in &self.failures {
            write!(formatter, "\n         {failure}")?;
        }
        Ok(())
    }
}
