//! Measured tables: the variant of a collective for each range of sizes, in a world.
//!
//! A [`TuningTable`] is for one world: a fabric and the ranks on their hosts. Its [`TuningRow`]s
//! give the [`Variant`] of a collective from a number of bytes on. The [`CostModel`]s fitted to the
//! same measurements serve for sizes and collectives without a row. A [`Tuning`] is the set of
//! tables of a file; `text` describes the format. [`tune`] makes rows of measurements; `pleach
//! tune` measures.
//!
//! **Invariants:** every row of a table can be carried out in the world of the table. The rows of a
//! collective have rising sizes and begin at 0. Two ranks whose tunings have the same digest choose
//! the same variants.

pub mod chunks;
mod error;
mod text;
pub mod tune;

use std::hash::Hasher as _;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use pleach_vocabulary::Fabric;

pub use error::{TuningError, TuningFault, TuningParseError};

use pleach_vocabulary::Collective;

use crate::cost::{CostModel, Platform};
use crate::generate::Variant;
use crate::hosts::HostMap;
use crate::select::{SelectError, select_variant};
use pleach_vocabulary::digest::Hasher64;

/// Names the file of [`TuningSource::File`].
pub const TUNING_VARIABLE: &str = "PLEACH_TUNING";

/// Most bytes of a tuning file.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// A row of a table: the variant that a collective takes from a number of bytes on.
#[derive(Clone, Debug, PartialEq)]
pub struct TuningRow {
    /// The collective; its root does not matter.
    pub collective: Collective,
    /// The smallest size in bytes, as [`whole_bytes`] counts it. Sizes differ by powers of two.
    pub from_bytes: u64,
    /// The variant.
    pub variant: Variant,
    /// The measured times, for readers only.
    pub note: Option<TuningNote>,
}

/// The measurements at the first size of a row.
#[derive(Clone, Debug, PartialEq)]
pub struct TuningNote {
    /// The size.
    pub bytes: u64,
    /// How long the row's variant took, in seconds.
    pub seconds: f64,
    /// The second fastest variant and its time.
    pub next: Option<(Variant, f64)>,
}

/// The measurements for one world; see the module.
#[derive(Clone, Debug, PartialEq)]
pub struct TuningTable {
    fabric: Fabric,
    hosts: HostMap,
    models: Option<(CostModel, CostModel)>,
    rows: Vec<TuningRow>,
}

impl TuningTable {
    /// A table without rows, for ranks of these hosts over this fabric.
    #[must_use]
    pub fn new(fabric: Fabric, hosts: HostMap) -> Self {
        Self { fabric, hosts, models: None, rows: Vec::new() }
    }

    /// The same table with these models, for sizes and collectives without a row: inside a host,
    /// and between hosts. The models keep four digits, those of their text.
    #[must_use]
    pub fn with_models(self, near: &CostModel, far: &CostModel) -> Self {
        Self { models: Some((text::as_written(near), text::as_written(far))), ..self }
    }

    /// Adds a row behind the others.
    ///
    /// # Errors
    ///
    /// The row cannot be carried out in this world.
    pub fn push(&mut self, row: TuningRow) -> Result<(), SelectError> {
        select_variant(&row.variant, row.collective, row.from_bytes, &self.platform())?;
        self.rows.push(TuningRow { collective: any_root(row.collective), ..row });
        Ok(())
    }

    /// The fabric of the world.
    #[must_use]
    pub fn fabric(&self) -> Fabric {
        self.fabric
    }

    /// The ranks on their hosts.
    #[must_use]
    pub fn hosts(&self) -> &HostMap {
        &self.hosts
    }

    /// All rows.
    #[must_use]
    pub fn rows(&self) -> &[TuningRow] {
        &self.rows
    }

    /// The models for sizes and collectives without a row: inside a host, and between hosts.
    #[must_use]
    pub fn models(&self) -> Option<&(CostModel, CostModel)> {
        self.models.as_ref()
    }

    /// The world, with the models of this table where it has some.
    #[must_use]
    pub fn platform(&self) -> Platform {
        let platform = Platform::over(self.fabric, self.hosts.clone());
        match self.models {
            Some((near, far)) => Platform { near, far, ..platform },
            None => platform,
        }
    }

    /// The variant for `bytes` bytes of the whole ([`whole_bytes`]), if there is a row.
    #[must_use]
    pub fn variant(&self, collective: Collective, bytes: u64) -> Option<&Variant> {
        let collective = any_root(collective);
        let rows = self.rows.iter().rev().filter(|row| row.collective == collective);
        rows.clone().find(|row| row.from_bytes <= bytes).map(|row| &row.variant)
    }
}

/// The tables of a file: at most one for a world.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tuning {
    tables: Vec<TuningTable>,
}

impl Tuning {
    /// Reads a file.
    ///
    /// # Errors
    ///
    /// See [`TuningError`]; it names the line.
    pub fn read(path: &Path) -> Result<Self, TuningError> {
        let failed =
            |source: io::Error| TuningError::Read { path: path.to_owned(), source: Arc::new(source) };
        let bytes = std::fs::metadata(path).map_err(failed)?.len();
        if bytes > FILE_BYTES_MAX {
            return Err(TuningError::TooLong { path: path.to_owned(), bytes, most: FILE_BYTES_MAX });
        }
        let text = std::fs::read_to_string(path).map_err(failed)?;
        text.parse().map_err(|misplaced| TuningError::Line { path: path.to_owned(), misplaced })
    }

    /// Adds a table, in the place of the table for the same world.
    pub fn insert(&mut self, table: TuningTable) {
        let same = |other: &&mut TuningTable| other.fabric == table.fabric && other.hosts == table.hosts;
        match self.tables.iter_mut().find(same) {
            Some(other) => *other = table,
            None => self.tables.push(table),
        }
    }

    /// The table for a world.
    #[must_use]
    pub fn table(&self, fabric: Fabric, hosts: &HostMap) -> Option<&TuningTable> {
        self.tables.iter().find(|table| table.fabric == fabric && table.hosts == *hosts)
    }

    /// All tables.
    #[must_use]
    pub fn tables(&self) -> &[TuningTable] {
        &self.tables
    }

    /// The digest that ranks compare: equal for equal tables, whatever their notes.
    #[must_use]
    pub fn digest(&self) -> u64 {
        let text = text::without_notes(self);
        let mut hasher = Hasher64::default();
        hasher.write(text.as_bytes());
        hasher.finish()
    }
}

/// The source of a group's tuning. It is the same on all ranks: they compare digests when they
/// meet.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum TuningSource {
    /// The cost model chooses.
    #[default]
    Nothing,
    /// From a file. If the file has no table for the group's world, the cost model chooses, and
    /// rank 0 warns.
    File(PathBuf),
    /// From these tables, in the same way.
    These(Arc<Tuning>),
}

impl TuningSource {
    /// The file that `PLEACH_TUNING` names.
    #[must_use]
    pub fn from_env() -> Self {
        match std::env::var_os(TUNING_VARIABLE).filter(|value| !value.is_empty()) {
            Some(path) => Self::File(path.into()),
            None => Self::Nothing,
        }
    }

    /// The same source with its file read.
    ///
    /// # Errors
    ///
    /// The file cannot be read, or holds no tuning.
    pub fn read(&self) -> Result<Self, TuningError> {
        match self {
            Self::File(path) => Ok(Self::These(Arc::new(Tuning::read(path)?))),
            other => Ok(other.clone()),
        }
    }

    /// The table of a world.
    #[must_use]
    pub fn table(&self, fabric: Fabric, hosts: &HostMap) -> Option<Arc<TuningTable>> {
        match self {
            Self::These(tuning) => tuning.table(fabric, hosts).cloned().map(Arc::new),
            _ => None,
        }
    }

    /// The digest that ranks compare at the rendezvous.
    #[must_use]
    pub fn knob(&self) -> String {
        match self {
            Self::These(tuning) => format!("{:016x}", tuning.digest()),
            _ => "none".to_owned(),
        }
    }

    /// Warns if the tuning has no table for this world, so that the cost model chooses. A world of
    /// one rank needs none. `named` is the source before its file was read.
    pub fn warn_without_table(&self, named: &Self, fabric: Fabric, hosts: &HostMap) {
        let Self::These(tuning) = self else { return };
        if hosts.ranks() == 1 || tuning.table(fabric, hosts).is_some() {
            return;
        }
        let known: Vec<_> =
            tuning.tables.iter().map(|table| format!("{} {}", table.fabric, table.hosts)).collect();
        let known = if known.is_empty() { "nothing".to_owned() } else { known.join(", ") };
        let file = match named {
            Self::File(path) => path.display().to_string(),
            _ => "the tuning given".to_owned(),
        };
        tracing::warn!(
            "no tuning for {fabric} {hosts} (hosts x ranks): {file} has {known}; the built-in selection are used, \
             'pleach tune' measures better ones"
        );
    }
}

/// The bytes that all parts of `part_bytes` have together, as tables and `pleach bench` count them.
/// For an all-to-all these are the blocks of one rank. For other collectives they are the blocks
/// that one rank has at the end or had at the beginning.
#[must_use]
pub fn whole_bytes(collective: Collective, part_bytes: u64, ranks: u32) -> u64 {
    let parts = if collective == Collective::AllToAll { ranks } else { collective.parts(ranks) };
    part_bytes.saturating_mul(parts.into())
}

/// The same collective with the roots that tables have.
fn any_root(collective: Collective) -> Collective {
    Collective::from_name(collective.name()).unwrap_or(collective)
}

#[cfg(test)]
mod tests {
    use crate::generate::{Access, Algorithm};

    use super::*;

    fn row(collective: Collective, from_bytes: u64, algorithm: Algorithm, access: Access) -> TuningRow {
        let variant = Variant { access: Some(access), ..algorithm.into() };
        TuningRow { collective, from_bytes, variant, note: None }
    }

    #[test]
    fn the_row_of_a_size_is_the_last_that_begins_below_it_whatever_the_root() {
        let mut table = TuningTable::new(Fabric::Shm, HostMap::one(4));
        table.push(row(Collective::Reduce { root: 3 }, 0, Algorithm::Chain, Access::Put)).expect("it fits");
        table.push(row(Collective::AllReduce, 0, Algorithm::Exchange, Access::Put)).expect("it fits");
        table.push(row(Collective::AllReduce, 4096, Algorithm::Direct, Access::Mapped)).expect("it fits");
        let name =
            |collective, bytes| table.variant(collective, bytes).map(|variant| variant.algorithm.to_string());
        assert_eq!(name(Collective::AllReduce, 0).as_deref(), Some("exchange"));
        assert_eq!(name(Collective::AllReduce, 4095).as_deref(), Some("exchange"));
        assert_eq!(name(Collective::AllReduce, 4096).as_deref(), Some("direct"));
        assert_eq!(name(Collective::Reduce { root: 1 }, 1 << 40).as_deref(), Some("chain"));
        assert_eq!(name(Collective::AllGather, 8), None);
    }

    #[test]
    fn without_models_of_its_own_a_table_has_those_of_its_fabric() {
        let far = |fabric| TuningTable::new(fabric, HostMap::one(2)).platform().far;
        assert_eq!(far(Fabric::Verbs), CostModel::VERBS);
        assert_eq!(far(Fabric::Tcp), CostModel::TCP);
    }

    #[test]
    fn what_cannot_be_carried_out_in_the_world_is_no_row() {
        let mut tcp = TuningTable::new(Fabric::Tcp, HostMap::one(4));
        let mapped = tcp.push(row(Collective::AllReduce, 0, Algorithm::Direct, Access::Mapped));
        assert!(matches!(mapped, Err(SelectError::NotMapped { .. })), "{mapped:?}");
        let grid = tcp.push(row(Collective::AllReduce, 0, Algorithm::Grid(vec![3, 1].into()), Access::Put));
        assert!(matches!(grid, Err(SelectError::Generate(_))), "{grid:?}");
        let chain = tcp.push(row(Collective::AllReduce, 0, Algorithm::Chain, Access::Put));
        assert!(matches!(chain, Err(SelectError::Generate(_))), "{chain:?}");
        for window in [0, 1 << 20] {
            let variant = Variant { window: Some(window), ..Algorithm::Ring.into() };
            let wide = tcp
                .push(TuningRow { variant, ..row(Collective::AllReduce, 0, Algorithm::Ring, Access::Put) });
            assert!(matches!(wide, Err(SelectError::Window { .. })), "{wide:?}");
        }
        assert!(tcp.rows().is_empty());
    }

    #[test]
    fn digests_differ_with_what_is_chosen_and_not_with_what_was_noted() {
        let tuning = |algorithm: Algorithm, from_bytes, note| {
            let mut table = TuningTable::new(Fabric::Tcp, HostMap::one(4));
            table
                .push(TuningRow { note, ..row(Collective::AllReduce, from_bytes, algorithm, Access::Put) })
                .expect("it fits");
            let mut tuning = Tuning::default();
            tuning.insert(table);
            tuning
        };
        let note = TuningNote { bytes: 8, seconds: 1e-6, next: None };
        let one = tuning(Algorithm::Ring, 0, None).digest();
        assert_eq!(one, tuning(Algorithm::Ring, 0, Some(note)).digest());
        assert_ne!(one, tuning(Algorithm::Direct, 0, None).digest());
        assert_ne!(one, tuning(Algorithm::Ring, 8, None).digest());
        assert_ne!(one, Tuning::default().digest());
    }

    #[test]
    fn a_table_takes_the_place_of_that_of_the_same_world() {
        let mut tuning = Tuning::default();
        let worlds = [(Fabric::Shm, 2), (Fabric::Shm, 4), (Fabric::Tcp, 4)];
        for (fabric, ranks) in worlds {
            tuning.insert(TuningTable::new(fabric, HostMap::one(ranks)));
        }
        let mut table = TuningTable::new(Fabric::Shm, HostMap::one(4));
        table.push(row(Collective::Barrier, 0, Algorithm::RecursiveDoubling, Access::Put)).expect("it fits");
        tuning.insert(table.clone());
        assert_eq!(tuning.tables().len(), worlds.len());
        assert_eq!(tuning.table(Fabric::Shm, &HostMap::one(4)), Some(&table));
        assert_eq!(tuning.table(Fabric::Tcp, &HostMap::one(4)).map(|table| table.rows().len()), Some(0));
        assert_eq!(tuning.table(Fabric::Shm, &HostMap::one(3)), None);
    }
}
