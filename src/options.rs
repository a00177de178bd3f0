//! Options that are keys of a config file and parameters of a URL: each is declared once.

#[cfg(feature = "serde")]
use std::{fmt, marker::PhantomData};
use std::{path::PathBuf, time::Duration};

#[cfg(feature = "serde")]
use serde::{
    Deserialize, Deserializer,
    de::{DeserializeSeed, Error, MapAccess, Visitor},
};

/// A set of options, each of which may be unset.
pub(crate) trait Options {
    /// Their names, in the order in which they are declared.
    fn keys(&self) -> &'static [&'static str];

    /// Sets an option from a parameter of a URL. `None` if there is no such option; the error says what is wrong with the value.
    fn set(&mut self, key: &str, value: &str) -> Option<Result<(), String>>;
}

/// A value that an option may have.
pub(crate) trait Value: Sized {
    /// Parses a parameter. The error says what is wrong with it.
    fn parse(text: &str) -> Result<Self, String>;

    /// Reads a value of a config file.
    #[cfg(feature = "serde")]
    fn read<'de, D: Deserializer<'de>>(value: D) -> Result<Self, D::Error>;
}

/// Makes [`Options`] of some fields of a struct, each an `Option` of its type.
macro_rules! options {
    ($name:ident { $($key:ident: $type:ty,)* }) => {
        impl $crate::options::Options for $name {
            fn keys(&self) -> &'static [&'static str] {
                &[$(stringify!($key)),*]
            }

            fn set(&mut self, key: &str, value: &str) -> Option<Result<(), String>> {
                match key {
                    $(stringify!($key) => {
                        let value = <$type as $crate::options::Value>::parse(value);
                        Some(value.map(|value| self.$key = Some(value)))
                    })*
                    _ => None,
                }
            }
        }

        impl $name {
            /// Takes over the options that are set in `other`.
            fn override_with(&mut self, other: &Self) {
                $(if other.$key.is_some() {
                    self.$key.clone_from(&other.$key);
                })*
            }

            /// Reads the value of an option from a config file.
            #[cfg(feature = "serde")]
            fn read_option<'de, M: serde::de::MapAccess<'de>>(
                &mut self,
                key: &str,
                map: &mut M,
            ) -> Result<(), M::Error> {
                match key {
                    $(stringify!($key) => {
                        self.$key = Some(map.next_value_seed($crate::options::Named::new(stringify!($key)))?);
                    })*
                    _ => {}
                }
                Ok(())
            }
        }
    };
}

/// Declares the options of one backend.
macro_rules! section {
    (
        $(#[$about:meta])*
        pub struct $name:ident {
            $($(#[$doc:meta])* pub $key:ident: $type:ty,)*
        }
    ) => {
        $(#[$about])*
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct $name {
            $($(#[$doc])* pub $key: Option<$type>,)*
        }

        options!($name { $($key: $type,)* });

        #[cfg(feature = "serde")]
        impl $crate::options::Table for $name {
            const NAME: &'static str = stringify!($name);
            const KEYS: &'static [&'static str] = &[$(stringify!($key)),*];

            fn read<'de, M: serde::de::MapAccess<'de>>(
                &mut self,
                key: &str,
                map: &mut M,
            ) -> Result<(), M::Error> {
                self.read_option(key, map)
            }
        }

        #[cfg(feature = "serde")]
        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                $crate::options::read_table(from)
            }
        }
    };
}

pub(crate) use {options, section};

impl Value for Duration {
    fn parse(text: &str) -> Result<Self, String> {
        humantime::parse_duration(text)
            .map_err(|error| format!("{text:?} is not a duration such as 30s or 500ms ({error})"))
    }

    #[cfg(feature = "serde")]
    fn read<'de, D: Deserializer<'de>>(value: D) -> Result<Self, D::Error> {
        Self::parse(&String::deserialize(value)?).map_err(D::Error::custom)
    }
}

macro_rules! plain {
    ($($type:ty: $text:ident => $parsed:expr;)*) => {$(
        impl Value for $type {
            fn parse($text: &str) -> Result<Self, String> {
                $parsed
            }

            #[cfg(feature = "serde")]
            fn read<'de, D: Deserializer<'de>>(value: D) -> Result<Self, D::Error> {
                Self::deserialize(value)
            }
        }
    )*};
}

plain! {
    u32: text => text.parse().map_err(|error| format!("{text:?} is not a whole number ({error})"));
    bool: text => text.parse().map_err(|_| format!("{text:?} is neither `true` nor `false`"));
    String: text => Ok(text.to_owned());
    PathBuf: text => Ok(text.into());
}

/// A table of a config file.
#[cfg(feature = "serde")]
pub(crate) trait Table: Options + Default {
    const NAME: &'static str;
    /// Every key.
    const KEYS: &'static [&'static str];
    /// The keys that have to be there.
    const REQUIRED: &'static [&'static str] = &[];

    /// Reads the value of a key that is known.
    fn read<'de, M: MapAccess<'de>>(&mut self, key: &str, map: &mut M) -> Result<(), M::Error>;
}

/// Reads a key. An unknown one is refused here, so that the error shows its line: the first line may have a password.
#[cfg(feature = "serde")]
struct Key<'a> {
    known: &'static [&'static str],
    seen: &'a [&'static str],
}

#[cfg(feature = "serde")]
impl<'de> DeserializeSeed<'de> for Key<'_> {
    type Value = &'static str;

    fn deserialize<D: Deserializer<'de>>(self, key: D) -> Result<&'static str, D::Error> {
        key.deserialize_identifier(self)
    }
}

#[cfg(feature = "serde")]
impl Visitor<'_> for Key<'_> {
    type Value = &'static str;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the key of an option")
    }

    fn visit_str<E: Error>(self, key: &str) -> Result<&'static str, E> {
        let Some(known) = self.known.iter().find(|known| **known == key) else {
            let known: Vec<_> = self.known.iter().map(|key| format!("`{key}`")).collect();
            return Err(E::custom(format_args!(
                "unknown key `{key}`; known are {}",
                known.join(", ")
            )));
        };
        if self.seen.contains(known) {
            return Err(E::custom(format_args!("`{key}` is there twice")));
        }
        Ok(known)
    }

    fn visit_bytes<E: Error>(self, key: &[u8]) -> Result<&'static str, E> {
        self.visit_str(&String::from_utf8_lossy(key))
    }
}

/// Reads a table. A key that is unknown, or there twice, is an error that names it.
#[cfg(feature = "serde")]
pub(crate) fn read_table<'de, D: Deserializer<'de>, T: Table>(from: D) -> Result<T, D::Error> {
    struct Reader<T>(PhantomData<T>);

    impl<'de, T: Table> Visitor<'de> for Reader<T> {
        type Value = T;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a table of options")
        }

        fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<T, M::Error> {
            let mut table = T::default();
            let mut seen = Vec::new();
            while let Some(key) = map.next_key_seed(Key {
                known: T::KEYS,
                seen: &seen,
            })? {
                table.read(key, &mut map)?;
                seen.push(key);
            }
            match T::REQUIRED.iter().find(|required| !seen.contains(required)) {
                Some(missing) => Err(M::Error::missing_field(missing)),
                None => Ok(table),
            }
        }
    }

    // As a struct: flattened into another, it is offered its own keys alone.
    from.deserialize_struct(T::NAME, T::KEYS, Reader(PhantomData))
}

/// Reads a value, and names its key in errors: not every format's say where they happened.
#[cfg(feature = "serde")]
pub(crate) struct Named<T> {
    key: &'static str,
    of: PhantomData<T>,
}

#[cfg(feature = "serde")]
impl<T> Named<T> {
    pub(crate) fn new(key: &'static str) -> Self {
        Self { key, of: PhantomData }
    }
}

#[cfg(feature = "serde")]
impl<'de, T: Value> DeserializeSeed<'de> for Named<T> {
    type Value = T;

    fn deserialize<D: Deserializer<'de>>(self, value: D) -> Result<T, D::Error> {
        T::read(value).map_err(|reason| D::Error::custom(format_args!("`{}`: {reason}", self.key)))
    }
}
