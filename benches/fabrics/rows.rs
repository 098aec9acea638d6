//! What is measured, by whom, and what the goals are.

/// Who does it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Runner {
    /// The command `pleach bench`, with these arguments.
    Pleach {
        /// For heads of columns.
        name: &'static str,
        arguments: &'static [&'static str],
        element_bytes: u8,
    },
    /// pleach's transport alone: puts of a few bytes into a peer's signal slot.
    Signal,
    Mpi(Mpi),
    Gloo,
    /// What two processes reach by hand.
    ByHand,
    /// The same of memory that the other one cannot reach.
    SliceByHand,
}

/// An implementation of MPI.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Mpi {
    /// The system's packages.
    Open,
    Mpich,
    /// Wheels of the Python index.
    Open5,
    Mpich5,
    Intel,
}

/// All of them, which `Goal`s name together.
pub(crate) const MPIS: [Runner; 5] = [
    Runner::Mpi(Mpi::Open),
    Runner::Mpi(Mpi::Open5),
    Runner::Mpi(Mpi::Mpich),
    Runner::Mpi(Mpi::Mpich5),
    Runner::Mpi(Mpi::Intel),
];

/// Without MPICH 5, which takes a scheduler's turn for every message where ranks share processors,
/// as MPICH does.
const MORE_RANKS_THAN_PROCESSORS: [Runner; 4] =
    [Runner::Mpi(Mpi::Open), Runner::Mpi(Mpi::Open5), Runner::Mpi(Mpi::Mpich), Runner::Mpi(Mpi::Intel)];

/// pleach with memory that peers reach, in f32.
pub(crate) const REGISTERED: Runner = pleach("pleach", &[]);
/// pleach with any memory of the caller's, in f32.
pub(crate) const SLICE: Runner = pleach("pleach slice", &["--memory", "slice"]);
const BF16: Runner =
    Runner::Pleach { name: "pleach bf16", arguments: &["--dtype", "bf16"], element_bytes: 2 };
const F16: Runner = Runner::Pleach { name: "pleach f16", arguments: &["--dtype", "f16"], element_bytes: 2 };
const PER_WORLD_SIZE: Runner = pleach("per world size", &["--reproducible", "per-world-size"]);
const EXACT: Runner = pleach("exact", &["--reproducible", "exact"]);

/// In f32.
const fn pleach(name: &'static str, arguments: &'static [&'static str]) -> Runner {
    Runner::Pleach { name, arguments, element_bytes: 4 }
}

impl Runner {
    /// For heads of columns.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Pleach { name, .. } => name,
            Self::Signal => "pleach",
            Self::Mpi(Mpi::Open) => "Open MPI",
            Self::Mpi(Mpi::Open5) => "Open MPI 5",
            Self::Mpi(Mpi::Mpich) => "MPICH",
            Self::Mpi(Mpi::Mpich5) => "MPICH 5",
            Self::Mpi(Mpi::Intel) => "Intel MPI",
            Self::Gloo => "Gloo",
            Self::ByHand | Self::SliceByHand => "loop by hand",
        }
    }

    /// Bytes of an element.
    pub(crate) fn element_bytes(self) -> f64 {
        match self {
            Self::Pleach { element_bytes, .. } => element_bytes.into(),
            _ => 4.0,
        }
    }
}

/// How bytes move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fabric {
    Shm,
    Tcp,
}

/// One thing that is measured.
pub(crate) struct Row {
    /// For `--only` and for files.
    pub(crate) name: &'static str,
    /// In words.
    pub(crate) title: String,
    /// As `pleach bench` and `benches/peers/` call it.
    pub(crate) collective: &'static str,
    pub(crate) fabric: Fabric,
    pub(crate) ranks: u32,
    /// Whether each iteration has memory of its own, which its rank has just written.
    pub(crate) fresh: bool,
    /// The first one is what others are compared with.
    pub(crate) runners: Vec<Runner>,
    /// In bytes, ascending.
    pub(crate) sizes: Vec<u64>,
    pub(crate) goals: Vec<Goal>,
}

/// How many times as quick as the quickest of other runners one must be, in elements a second, at
/// all sizes from one to another.
pub(crate) struct Goal {
    pub(crate) ours: Runner,
    pub(crate) against: &'static [Runner],
    pub(crate) from: u64,
    pub(crate) to: u64,
    pub(crate) speed: f64,
}

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const ALL: [u64; 11] = [8, 64, KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB];
const QUICK: [u64; 5] = [8, KIB, 64 * KIB, MIB, 16 * MIB];
const END: u64 = u64::MAX;

fn goal(ours: Runner, against: &'static [Runner], from: u64, to: u64, speed: f64) -> Goal {
    Goal { ours, against, from, to, speed }
}

/// `first`, the `peers`, and `last`.
fn beside(first: Runner, peers: &[Runner], last: &[Runner]) -> Vec<Runner> {
    [&[first], peers, last].concat()
}

/// A row of an all-reduce in place, without goals.
fn all_reduce(name: &'static str, title: &str, fabric: Fabric, ranks: u32, runners: &[Runner]) -> Row {
    Row {
        name,
        title: format!("all-reduce, f32 sum in place, {title}"),
        collective: "all-reduce",
        fabric,
        ranks,
        fresh: false,
        runners: runners.to_vec(),
        sizes: Vec::new(),
        goals: Vec::new(),
    }
}

/// All rows.
pub(crate) fn rows(quick: bool) -> Vec<Row> {
    use Runner::{ByHand, Gloo, SliceByHand};
    let sizes: &[u64] = if quick { &QUICK } else { &ALL };
    let of = |from: u64, to: u64| -> Vec<u64> {
        sizes.iter().copied().filter(|bytes| (from..=to).contains(bytes)).collect()
    };
    let mut rows = vec![
        Row {
            sizes: of(0, END),
            goals: vec![
                goal(REGISTERED, &MPIS, 8, KIB, 1.3),
                goal(REGISTERED, &MPIS, 2 * KIB, 32 * KIB, 1.5),
                goal(REGISTERED, &MPIS, 64 * KIB, END, 3.0),
                goal(REGISTERED, &[ByHand], 64 * KIB, END, 0.7),
            ],
            ..all_reduce(
                "shm2",
                "shared memory, 2 ranks, registered",
                Fabric::Shm,
                2,
                &beside(REGISTERED, &MPIS, &[ByHand]),
            )
        },
        Row {
            sizes: of(64 * KIB, END),
            goals: vec![goal(SLICE, &MPIS, 64 * KIB, END, 1.5)],
            ..all_reduce(
                "slice2",
                "shared memory, 2 ranks, any slice",
                Fabric::Shm,
                2,
                &beside(SLICE, &MPIS, &[SliceByHand]),
            )
        },
        Row {
            sizes: of(KIB, 16 * MIB),
            fresh: true,
            ..all_reduce(
                "fresh2",
                "shared memory, 2 ranks, registered, on memory that each rank has just written",
                Fabric::Shm,
                2,
                &beside(REGISTERED, &MPIS, &[ByHand]),
            )
        },
        Row {
            sizes: of(0, 16 * MIB),
            goals: vec![goal(REGISTERED, &MPIS, 0, END, 1.3)],
            ..all_reduce(
                "shm4",
                "shared memory, 4 ranks, registered",
                Fabric::Shm,
                4,
                &beside(REGISTERED, &MORE_RANKS_THAN_PROCESSORS, &[]),
            )
        },
    ];
    for (name, ranks, mpis) in [("tcp2", 2, &MPIS[..]), ("tcp4", 4, &MORE_RANKS_THAN_PROCESSORS)] {
        rows.push(Row {
            sizes: of(0, 16 * MIB),
            goals: vec![
                goal(REGISTERED, &MPIS, 8, 4 * KIB, 1.1),
                goal(REGISTERED, &MPIS, 64 * KIB, END, 1.2),
                goal(REGISTERED, &[Gloo], 0, END, 2.0),
            ],
            ..all_reduce(
                name,
                &format!("TCP over loopback, {ranks} ranks"),
                Fabric::Tcp,
                ranks,
                &beside(REGISTERED, mpis, &[Gloo]),
            )
        });
    }
    rows.push(Row {
        collective: "ping-pong",
        title: "a put with a signal, 8 bytes, one way, against half a ping-pong".to_owned(),
        sizes: vec![8],
        goals: vec![goal(Runner::Signal, &MPIS, 0, END, 2.0)],
        ..all_reduce("signal", "", Fabric::Shm, 2, &beside(Runner::Signal, &MPIS, &[ByHand]))
    });
    rows.push(Row {
        title: "all-reduce, sum in place, shared memory, 2 ranks, by element type, in elements a second"
            .to_owned(),
        sizes: vec![64 * MIB],
        goals: vec![goal(BF16, &[REGISTERED], 0, END, 1.5), goal(F16, &[REGISTERED], 0, END, 1.5)],
        ..all_reduce("types", "", Fabric::Shm, 2, &[REGISTERED, BF16, F16])
    });
    rows.extend(reproducible(&of(0, 16 * MIB)));
    rows.extend(collectives());
    rows
}

/// What it costs that results are the same bits again.
fn reproducible(sizes: &[u64]) -> impl Iterator<Item = Row> {
    [("reproducible2", 2), ("reproducible4", 4)].into_iter().map(|(name, ranks)| Row {
        sizes: sizes.iter().copied().step_by(2).collect(),
        ..all_reduce(
            name,
            &format!("shared memory, {ranks} ranks, by what results are the same bits again for"),
            Fabric::Shm,
            ranks,
            &[REGISTERED, PER_WORLD_SIZE, EXACT],
        )
    })
}

/// The other collectives, at a few sizes.
fn collectives() -> impl Iterator<Item = Row> {
    let names = [
        "broadcast",
        "reduce",
        "all-gather",
        "reduce-scatter",
        "gather",
        "scatter",
        "all-to-all",
        "send-recv",
        "barrier",
    ];
    names.into_iter().map(|name| Row {
        title: format!("{name}, f32, shared memory, 2 ranks, registered"),
        collective: name,
        sizes: if name == "barrier" { vec![0] } else { vec![8, 64 * KIB, 4 * MIB] },
        goals: vec![goal(REGISTERED, &MPIS, 0, END, 1.0)],
        ..all_reduce(name, "", Fabric::Shm, 2, &beside(REGISTERED, &MPIS, &[]))
    })
}
