//! The state of one rank as a file of safetensors.

use std::collections::BTreeMap;

use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};

/// The tensor with what the scheme remembers besides vectors.
const STATE: &str = "state";

/// Before the names of the program.
const OWN: &str = "program.";

/// All that a rank needs to go on with a training from a step: vectors by their names, and what the
/// scheme remembers besides. Those of the program have names of its own.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RankState {
    vectors: BTreeMap<String, Vec<f32>>,
    state: Vec<u8>,
}

impl RankState {
    /// A rank that remembers these bytes, without vectors.
    #[must_use]
    pub fn new(state: Vec<u8>) -> Self {
        Self { vectors: BTreeMap::new(), state }
    }

    /// Adds a vector. One that was added before by this name is replaced.
    pub fn insert(&mut self, name: &str, elements: &[f32]) {
        self.vectors.insert(name.to_owned(), elements.to_vec());
    }

    /// Adds a vector of the program, as the velocity of its optimizer.
    pub fn insert_own(&mut self, name: &str, elements: &[f32]) {
        self.insert(&format!("{OWN}{name}"), elements);
    }

    /// The vector of the program of this name.
    #[must_use]
    pub fn own_vector(&self, name: &str) -> Option<&[f32]> {
        self.vector(&format!("{OWN}{name}"))
    }

    /// The vector of this name.
    #[must_use]
    pub fn vector(&self, name: &str) -> Option<&[f32]> {
        self.vectors.get(name).map(Vec::as_slice)
    }

    /// What the scheme remembers besides vectors.
    #[must_use]
    pub fn state(&self) -> &[u8] {
        &self.state
    }

    /// The file.
    ///
    /// # Errors
    ///
    /// It would be too long for this machine, in the words of the encoder.
    pub fn encode(&self) -> Result<Vec<u8>, String> {
        let bytes = |elements: &[f32]| elements.iter().flat_map(|element| element.to_le_bytes()).collect();
        let blocks: Vec<(&str, Dtype, usize, Vec<u8>)> = self
            .vectors
            .iter()
            .map(|(name, elements)| (name.as_str(), Dtype::F32, elements.len(), bytes(elements)))
            .chain([(STATE, Dtype::U8, self.state.len(), self.state.clone())])
            .collect();
        let views = blocks.iter().map(|(name, kind, len, bytes)| {
            Ok((*name, TensorView::new(*kind, vec![*len], bytes).map_err(|error| error.to_string())?))
        });
        let views = views.collect::<Result<Vec<_>, String>>()?;
        safetensors::serialize(views, None).map_err(|error| error.to_string())
    }

    /// The rank of a file.
    ///
    /// # Errors
    ///
    /// What is wrong with the file, in words.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        let file = SafeTensors::deserialize(bytes).map_err(|error| format!("no safetensors: {error}"))?;
        let (mut vectors, mut state) = (BTreeMap::new(), None);
        for (name, tensor) in file.iter() {
            match (tensor.dtype(), tensor.shape()) {
                (Dtype::U8, [_]) if name == STATE => state = Some(tensor.data().to_vec()),
                (Dtype::F32, [_]) => {
                    let elements = tensor.data().chunks_exact(size_of::<f32>());
                    let element = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().expect("four bytes"));
                    vectors.insert(name.to_owned(), elements.map(element).collect());
                }
                (kind, shape) => return Err(format!("tensor '{name}' is {kind:?} of shape {shape:?}")),
            }
        }
        let state = state.ok_or_else(|| format!("there is no tensor '{STATE}'"))?;
        Ok(Self { vectors, state })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_gives_the_rank_back_bit_for_bit_and_another_file_is_refused() {
        let mut rank = RankState::new(vec![1, 2, 3]);
        rank.insert("parameters", &[0.0, -0.0, f32::from_bits(0x7fc0_0001), f32::MIN_POSITIVE / 2.0]);
        rank.insert("nothing", &[]);
        let file = rank.encode().expect("is short");
        let again = RankState::decode(&file).expect("is a file");
        let bits = |rank: &RankState| -> Vec<u32> {
            rank.vector("parameters").expect("is there").iter().map(|element| element.to_bits()).collect()
        };
        assert_eq!((bits(&again), again.state()), (bits(&rank), &[1, 2, 3][..]));
        assert_eq!((again.vector("nothing"), again.vector("centre")), (Some(&[][..]), None));
        for len in 0..file.len() {
            assert!(RankState::decode(&file[..len]).is_err(), "{len}");
        }
        let view = TensorView::new(Dtype::F32, vec![1], &[0; 4]).expect("four bytes");
        let stateless = safetensors::serialize([("parameters", view)], None).expect("is short");
        assert!(RankState::decode(&stateless).expect_err("has no state").contains("'state'"));
    }
}
