//! Blink (Wang et al. 2020): steps of data parallel training on parts of a DGX-1V, by packed trees
//! and by rings.

use std::fmt::Write as _;

use pleach::Collective;
use pleach::packing::allocations::allocations;
use pleach::packing::compare::{StrategyError, ring, rings};
use pleach::packing::topology::{Topology, preset};
use pleach::packing::{PackOptions, Packing, Rate, pack};
use pleach_training::Layout;
use pleach_training::order::{Bucket, Link, Order};
use pleach_training::parallelize::{Layer, NUMBER_BYTES, Network, Shape};

use super::{Claim, Material, Verdict, head};

pub(crate) const SHORTER: &str = "Blink: shorter steps";

/// Images of a rank's batch.
const BATCH: f64 = 32.0;

/// Operations a second of a V100 in single precision: what its data sheet says, and half of it.
const FLOP_PER_S: [f64; 2] = [7.85e12, 15.7e12];

/// The most bytes of a bucket: those of torch's DistributedDataParallel.
const BUCKET_BYTES: usize = 25 << 20;

/// What the paper says of the best case.
const PAPER: f64 = 0.40;

/// Configuration D of Simonyan and Zisserman (arXiv 1409.1556).
fn vgg_16() -> Result<Network, String> {
    /// Inputs, outputs, rows of a feature map.
    const CONVOLUTIONS: [(u64, u64, u64); 13] = [
        (3, 64, 224),
        (64, 64, 224),
        (64, 128, 112),
        (128, 128, 112),
        (128, 256, 56),
        (256, 256, 56),
        (256, 256, 56),
        (256, 512, 28),
        (512, 512, 28),
        (512, 512, 28),
        (512, 512, 14),
        (512, 512, 14),
        (512, 512, 14),
    ];
    let convolutions =
        CONVOLUTIONS.map(|(inputs, outputs, side)| Shape::Convolution { inputs, outputs, kernel: 3, side });
    let connected = [(25_088, 4_096), (4_096, 4_096), (4_096, 1_000)]
        .map(|(inputs, outputs)| Shape::FullyConnected { inputs, outputs });
    let layers = convolutions.into_iter().chain(connected).map(|shape| Layer::new("layer", shape));
    let layers = layers.collect::<Result<_, _>>().map_err(|error| error.to_string())?;
    Network::new("vgg-16", layers).map_err(|error| error.to_string())
}

/// A step of a network: how long it computes, and its buckets with the times at which they are
/// ready, in the order in which they are.
struct Step {
    computing_ns: u64,
    buckets: Vec<Bucket>,
}

impl Step {
    /// A third of the computing is the forward pass. A layer takes its share of the operations.
    fn new(network: &Network, flop_per_s: f64) -> Self {
        let pass_s = |layer: &Layer| 2.0 * layer.multiply_adds() as f64 * BATCH / flop_per_s;
        let forward_s: f64 = network.layers().iter().map(pass_s).sum();
        let lengths: Vec<usize> = network.layers().iter().map(|layer| layer.weights() as usize).collect();
        let mut ready_s = vec![0.0; lengths.len()];
        let mut now_s = forward_s;
        for (layer, ready_s) in network.layers().iter().zip(&mut ready_s).rev() {
            now_s += 2.0 * pass_s(layer);
            *ready_s = now_s;
        }
        let ns = |time_s: f64| (time_s * 1e9) as u64;
        let ends: Vec<usize> = lengths
            .iter()
            .scan(0, |end, length| {
                *end += length;
                Some(*end)
            })
            .collect();
        let buckets = Layout::of(&lengths).buckets(BUCKET_BYTES).into_iter().map(|piece| {
            // The first layer of a bucket is ready last.
            let first = ends.iter().position(|end| piece.start < *end).unwrap_or_default();
            let bytes = piece.len() as u64 * NUMBER_BYTES;
            Bucket { ready_ns: ns(ready_s[first]), needed_ns: ns(now_s), bytes }
        });
        let buckets = buckets.collect();
        Self { computing_ns: ns(now_s), buckets }
    }

    /// The time of a step at this rate of all-reduces. Gradients are exchanged in the order in
    /// which they are ready, and the step ends with the last.
    fn time_ns(&self, rate: f64) -> Result<u64, String> {
        let link = Link { bytes_per_s: rate as u64, piece_ns: 0 };
        let order =
            Order::fifo(&self.buckets, link, BUCKET_BYTES as u64).map_err(|error| error.to_string())?;
        Ok(order.done_ns().iter().copied().fold(self.computing_ns, u64::max))
    }

    /// The same step if no gradient travels before all are computed.
    fn without_overlap(&self) -> Self {
        let late = |bucket: &Bucket| Bucket { ready_ns: self.computing_ns, ..*bucket };
        Self { computing_ns: self.computing_ns, buckets: self.buckets.iter().map(late).collect() }
    }
}

fn as_f64(rate: Rate) -> f64 {
    *rate.numer() as f64 / *rate.denom() as f64
}

/// The rates of an allocation by packed trees and by rings, and whether rings are on NVLinks.
pub(crate) struct Rates {
    packed: f64,
    ring: f64,
    pub(crate) has_ring: bool,
}

impl Rates {
    /// Whether packed trees are at least as quick, up to rounding.
    pub(crate) fn is_no_slower(&self) -> bool {
        self.packed >= self.ring * (1.0 - 1e-9)
    }
}

/// The rates of all connected allocations of 3 to 8 GPUs.
pub(crate) fn rates() -> Result<Vec<Rates>, String> {
    let server = preset("dgx-1v").map_err(|error| error.to_string())?;
    allocations(&server, 3..=8).iter().map(|allocation| of_allocation(&allocation.topology)).collect()
}

fn of_allocation(topology: &Topology) -> Result<Rates, String> {
    let optimum: Packing =
        pack(topology, Collective::AllReduce, &PackOptions::default()).map_err(|error| error.to_string())?;
    let packed = as_f64(optimum.rate);
    match rings(topology, &optimum) {
        Ok(rings) => Ok(Rates { packed, ring: as_f64(rings.rate), has_ring: true }),
        Err(StrategyError::NoRing | StrategyError::NoRingFound) => {
            let pcie = topology.pcie_ring_bytes_per_s().ok_or("a DGX-1V has PCIe")?;
            let rate = ring::one_way_rate(Collective::AllReduce, topology.ranks(), pcie);
            Ok(Rates { packed, ring: as_f64(rate), has_ring: false })
        }
        Err(error) => Err(error.to_string()),
    }
}

/// The share of a step that packed trees save.
fn saving(step: &Step, rates: &Rates) -> Result<f64, String> {
    Ok(1.0 - step.time_ns(rates.packed)? as f64 / step.time_ns(rates.ring)? as f64)
}

/// The largest and the mean share that packed trees save of a step, over these allocations.
fn savings<'a>(step: &Step, all: impl Iterator<Item = &'a Rates>) -> Result<[f64; 2], String> {
    let each = all.map(|rates| saving(step, rates)).collect::<Result<Vec<f64>, _>>()?;
    let most = each.iter().copied().fold(0.0, f64::max);
    Ok([most, each.iter().sum::<f64>() / each.len() as f64])
}

/// Savings of training steps.
pub(crate) fn shorter_steps(_: &Material) -> Result<Claim, String> {
    let all = rates()?;
    let mut table = head(&[
        "network",
        "TFLOP/s",
        "computing, ms",
        "rings on",
        "allocations",
        "largest saving",
        "mean saving",
        "largest without overlap",
        "mean without overlap",
    ]);
    let mut best = [0.0_f64; 4];
    let resnet = Network::named("resnet-50").ok_or("no network resnet-50")?;
    for (name, network) in [("ResNet-50", resnet), ("VGG-16", vgg_16()?)] {
        for flop_per_s in FLOP_PER_S {
            let step = Step::new(&network, flop_per_s);
            let (computing_ms, tflop_per_s) = (step.computing_ns as f64 / 1e6, flop_per_s / 1e12);
            for (on, has_ring) in [("NVLink", Some(true)), ("PCIe", Some(false)), ("either", None)] {
                let chosen = || all.iter().filter(|rates| has_ring.is_none_or(|has| has == rates.has_ring));
                let [most, mean] = savings(&step, chosen())?;
                let [most_apart, mean_apart] = savings(&step.without_overlap(), chosen())?;
                let percents = [most, mean, most_apart, mean_apart];
                let cells = percents.map(|share| format!("{:.1} %", share * 100.0)).join(" | ");
                let count = chosen().count();
                let _ = writeln!(
                    table,
                    "| {name} | {tflop_per_s} | {computing_ms:.0} | {on} | {count} | {cells} |"
                );
                if has_ring.is_none() {
                    best.iter_mut().zip(percents).for_each(|(best, share)| *best = best.max(share));
                }
            }
        }
    }
    let [most, mean, most_apart, mean_apart] = best.map(|share| share * 100.0);
    Ok(Claim {
        name: SHORTER,
        claim: "training steps are shorter by up to 40 % (geometric mean 6.3 %)",
        experiment: format!(
            "`sync` in buckets of 25 MiB, ResNet-50 and VGG-16, {BATCH} images a rank, the {} connected allocations of 3 to 8 \
             GPUs of a DGX-1V; all-reduces at the rate of packed trees and of the most rings that fit (over PCIe where none \
             does), computing at the rate of a V100's data sheet and at half of it",
            all.len()
        ),
        acceptance: "largest and mean saving beside 40 %",
        found: format!(
            "largest {most:.1} %, mean {mean:.1} % at most; without overlap largest {most_apart:.1} %, mean {mean_apart:.1} %"
        ),
        verdict: Verdict::of(
            most >= PAPER * 100.0,
            "gradients travel while others are computed, and the backward pass hides even a ring over PCIe; where nothing is \
             hidden the means are near the paper's, and its AlexNet and ResNet-18 compute less than these networks",
        ),
        table,
    })
}
