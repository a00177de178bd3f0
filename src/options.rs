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

/// A field of a backend's config, which takes the value of an option.
#[cfg_attr(
    not(any(
        all(feature = "file", unix),
        feature = "redis",
        feature = "zk",
        feature = "mysql",
        feature = "etcd",
        feature = "postgres"
    )),
    expect(dead_code, reason = "only memory is there, which has no options")
)]
pub(crate) trait Field<T> {
    /// Sets it. The error names the option.
    fn set(&mut self, value: &T) -> lockkit_core::Result<()>;
}

impl<T: Clone> Field<T> for T {
    fn set(&mut self, value: &T) -> lockkit_core::Result<()> {
        self.clone_from(value);
        Ok(())
    }
}

impl<T: Clone> Field<T> for Option<T> {
    fn set(&mut self, value: &T) -> lockkit_core::Result<()> {
        *self = Some(value.clone());
        Ok(())
    }
}

/// Reads the fields of these types from words.
macro_rules! words {
    ($($(#[$built:meta])* $type:ty,)*) => {$(
        $(#[$built])*
        impl Field<String> for $type {
            fn set(&mut self, word: &String) -> lockkit_core::Result<()> {
                *self = word.parse()?;
                Ok(())
            }
        }

        $(#[$built])*
        impl Field<String> for Option<$type> {
            fn set(&mut self, word: &String) -> lockkit_core::Result<()> {
                *self = Some(word.parse()?);
                Ok(())
            }
        }
    )*};
}

words! {
    lockkit_core::spi::Tls,
    #[cfg(feature = "mysql")] lockkit_mysql::Mode,
    #[cfg(feature = "mysql")] lockkit_mysql::PublicKey,
    #[cfg(feature = "mysql")] lockkit_mysql::Schema,
    #[cfg(feature = "postgres")] lockkit_postgres::Schema,
    #[cfg(feature = "postgres")] lockkit_postgres::SslMode,
    #[cfg(feature = "zk")] lockkit_zk::Access,
    #[cfg(feature = "zk")] lockkit_zk::Nodes,
    #[cfg(feature = "zk")] lockkit_zk::Parents,
}

/// Declares a table of a config file: what has to be there, options, and tables of options. Each option is an `Option` of its
/// type, and a parameter of the URL.
macro_rules! table {
    (
        $(#[$about:meta])*
        pub struct $name:ident {
            $($(#[$required_doc:meta])* pub $required:ident: $required_type:ty,)*
        }
        options {
            $($(#[$doc:meta])* pub $key:ident: $type:ty,)*
        }
        sections {
            $($(#[$section_doc:meta])* pub $section:ident: $section_type:ty,)*
        }
    ) => {
        $(#[$about])*
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct $name {
            $($(#[$required_doc])* pub $required: $required_type,)*
            $($(#[$doc])* pub $key: Option<$type>,)*
            $($(#[$section_doc])* pub $section: $section_type,)*
        }

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
                $(self.$section.override_with(&other.$section);)*
            }
        }

        #[cfg(feature = "serde")]
        impl $crate::options::Table for $name {
            const NAME: &'static str = stringify!($name);
            const KEYS: &'static [&'static str] =
                &[$(stringify!($required),)* $(stringify!($key),)* $(stringify!($section),)*];
            const REQUIRED: &'static [&'static str] = &[$(stringify!($required)),*];

            fn read<'de, M: serde::de::MapAccess<'de>>(&mut self, key: &str, map: &mut M) -> Result<(), M::Error> {
                match key {
                    $(stringify!($required) => self.$required = map.next_value::<String>()?.into(),)*
                    $(stringify!($key) => {
                        self.$key = Some(map.next_value_seed($crate::options::Named::new(stringify!($key)))?);
                    })*
                    $(stringify!($section) => self.$section = map.next_value()?,)*
                    _ => {}
                }
                Ok(())
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

/// Declares the options of one backend, which the fields of the same names in its config take.
macro_rules! section {
    (
        $(#[$about:meta])*
        pub struct $name:ident for $config:path, if $built:meta {
            $($(#[$doc:meta])* pub $key:ident: $type:ty,)*
        }
    ) => {
        $crate::options::table! {
            $(#[$about])*
            pub struct $name {}
            options { $($(#[$doc])* pub $key: $type,)* }
            sections {}
        }

        #[cfg($built)]
        impl $name {
            /// Sets the options that are set here, and the namespace.
            pub(crate) fn apply(&self, config: &mut $config, namespace: &str) -> lockkit_core::Result<()> {
                namespace.clone_into(&mut config.namespace);
                $(if let Some(value) = &self.$key {
                    $crate::options::Field::set(&mut config.$key, value)?;
                })*
                Ok(())
            }
        }
    };
}

pub(crate) use {section, table};

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
